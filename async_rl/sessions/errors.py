"""The refusals of requests, and the HTTP answers that show them in the form of OpenAI's and
Anthropic's APIs.
"""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from async_rl.core.errors import AsyncRLError, ConfigError, DataError
from async_rl.wire.http import json_response

Json = dict[str, Any]
"""A JSON object."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "api_error",
}
"""The types of errors of both APIs, by the status; any other is an invalid_request_error."""


class Refused(AsyncRLError):
    """The request is answered by an error. code: OpenAI's name of the reason, where it has one.
    param: the parameter that is wrong.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def refusal_of(error: AsyncRLError) -> Refused:
    """Return the refusal for an error: any other than a refusal, and an error about the request or
    the configuration, is a failure of the engine.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, DataError | ConfigError):
        return Refused(str(error))
    return Refused(f"no answer: {error}", status=503, code="engine_unavailable")


def error_of(refused: Refused) -> Json:
    """Return the error in the form of both APIs: Anthropic's has `type` next to it, OpenAI's has
    more in it.
    """
    kind = _KINDS.get(refused.status, "invalid_request_error")
    error = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
    return {"type": "error", "error": error}


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = Refused(message, status=error.status_code)
    assert isinstance(error, AsyncRLError)
    refused = refusal_of(error)
    response = json_response(error_of(refused), refused.status)
    # Clients repeat the request then.
    if refused.status == 503:
        response.headers["Retry-After"] = "1"
    return response


async def _disconnected(_: Request, __: Exception) -> Response:
    # Nobody reads it; proxies log this status for a client that left.
    return Response(status_code=499)


HANDLERS: Mapping[Any, ExceptionHandler] = {
    AsyncRLError: _refuse,
    HTTPException: _refuse,
    ClientDisconnect: _disconnected,
}
"""By the exception that a handler of a route raises."""
