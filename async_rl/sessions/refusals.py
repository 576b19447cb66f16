"""Why a request is refused, in words that every form of the endpoint translates into its own."""

from __future__ import annotations


class Refused(Exception):
    """The request is answered by an error. code: OpenAI's name of the reason, where it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def too_long(num_tokens: int, limit: int) -> Refused:
    """The refusal of a call for which the session has no room."""
    return Refused(
        400,
        f"this call would begin with {num_tokens} tokens in the session, whose limit is {limit}"
        " (data.max_response_tokens, every segment counted); shorten the history or raise it",
        code="context_length_exceeded",
    )
