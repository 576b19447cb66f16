"""The gateway of a training service: its HTTP front, the routes of the Tinker API around the desk
(docs/service.md).

takes: requests of programs
waits for: the learner and the generators, per request
returns: answers, which outlive this process
woken by: the programs, the answers of the other processes, `stopping`

Every request but healthz needs the key, as `X-API-Key`. An error is `{"detail": text}` with a
status; a request that is refused after it was accepted is answered by `{"error", "category"}`.
"""

import hmac
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from async_rl.core.errors import AsyncRLError
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Drain
from async_rl.runtime.context import ProcessContext
from async_rl.service.address import FOLDER, address_of
from async_rl.service.api import QUERIES, Api
from async_rl.service.desk import Desk
from async_rl.service.forms import Call, Named
from async_rl.service.order import SAVES
from async_rl.service.processes import Processes
from async_rl.service.sampling import Model
from async_rl.service.store import Store
from async_rl.sessions.errors import HANDLERS, Refused
from async_rl.sessions.server import KEEP_ALIVE_S, spare_heap
from async_rl.wire.http import body_of, json_response, listen, serving, url_of, while_connected

EMBEDDED = "tiny_coder"
_MOST_BYTES = 128 << 20
_CONFIG = {
    "pjwt_auth_enabled": False,
    # A session sends whole batches, so that a batch is one request.
    "fwdbwd_max_chunk_len": 10_000,
    "fwdbwd_max_chunk_bytes_count": 64_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 128_000_000,
}


async def run(context: ProcessContext) -> None:
    """Serve programs until the process has to stop."""
    await context.directory.changed(-1)  # the first member list
    spare_heap()
    address = address_of(context.run_dir)
    store = Store(context.run_dir / FOLDER)
    desk = Desk(store, Processes(context), model_of(context))

    async def drain(_: Drain) -> Message:
        # The next life finds the accepted requests in the store.
        context.stopping.set()
        return Ok()

    with listen(context.host, address.port) as listener:
        app = build_app(desk, address.api_key)
        async with serving(app, listener, keep_alive_s=KEEP_ALIVE_S):
            await context.serve({Drain: drain})
            context.log.info("programs find this service at %s", url_of(listener))
            await context.work_until_stopped(desk.run(), {})


def model_of(context: ProcessContext) -> Model:
    """Return what clients are told about the base model."""
    config = context.config
    adapter = config.model.adapter
    described = json.loads((context.model_path / "config.json").read_bytes())
    return Model(
        name=config.model.path or EMBEDDED,
        tokenizer=str(context.model_path),
        vocab_size=described.get("text_config", described)["vocab_size"],
        context_tokens=config.data.max_prompt_tokens + config.data.max_response_tokens,
        most_rank=adapter.rank if adapter else 0,
    )


async def _retrieve(store: Store, call: Call) -> Response:
    request_id = call.read(Named).request_id
    found = await store.wait(request_id)
    if found is None:
        again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return json_response(again)
    if found.error:
        return json_response({"error": found.error, "category": "user"})
    is_proto = found.kind in ("sample", "forward", "forward_backward")
    kind = "application/x-protobuf" if is_proto else "application/json"
    return Response(found.answer, media_type=kind)


def build_app(desk: Desk, key: str) -> ASGIApp:
    """Return the ASGI application. key: what clients send as X-API-Key."""
    api = Api(desk)
    model = desk.model
    saved = "training_runs/{run_id}/checkpoints/{kind}/{name}"
    served = {"max_context_length": model.context_tokens, "trainable": True, "sampleable": True}
    models = {"supported_models": [{"model_name": model.name, **served}]}
    handlers: dict[str, Callable[[Call], Any]] = {
        "GET healthz": lambda _: {"status": "ok"},
        "GET get_server_capabilities": lambda _: models,
        "GET samples/{sequence_id}": api.sequence,
        f"GET {saved}/external_weights_urls": api.urls,
        **{request: partial(api.shown, query) for request, query in QUERIES.items()},
        "POST client/config": lambda _: _CONFIG,
        "POST client/dynamic_config": lambda _: {"sample_cancel_enabled": True},
        "POST telemetry": lambda _: {"status": "accepted"},
        "POST create_session": api.create_session,
        "POST session_heartbeat": api.heartbeat,
        "POST sessions/{session_id}/finish": api.finish,
        "POST create_model": api.create_model,
        "POST unload_model": api.unload,
        "POST forward_backward": api.forward_backward,
        "POST load_weights": api.load_weights,
        "POST create_sampling_session": api.create_sampler,
        "POST asample": desk.sample,
        "POST retrieve_future": partial(_retrieve, desk.store),
        "POST cancel_future": desk.cancel,
        **{f"POST {kind}": partial(api.numbered, kind) for kind in ("optim_step", *SAVES)},
        f"DELETE {saved}": api.delete,
        f"PUT {saved}/ttl": api.set_ttl,
    }

    async def handle(handler: Callable[[Call], Any], request: HttpRequest) -> Response:
        given = request.headers.get("x-api-key", "").encode()
        is_open = request.url.path.endswith("/healthz")
        if not (is_open or hmac.compare_digest(given, key.encode())):
            raise Refused("X-API-Key is missing or wrong", status=401)
        call = Call(
            body=await body_of(request, most_bytes=_MOST_BYTES),
            path=request.path_params,
            query=dict(request.query_params),
        )
        answer = handler(call)
        if isinstance(answer, Awaitable):
            return await while_connected(request, answer)
        return json_response({} if answer is None else answer)

    return Starlette(
        routes=[
            Route(f"/api/v1/{call.split()[1]}", partial(handle, handler), methods=call.split()[:1])
            for call, handler in handlers.items()
        ],
        exception_handlers={
            **HANDLERS,
            AsyncRLError: _refuse,
            HTTPException: _refuse,
            msgspec.ValidationError: _refuse,
        },
    )


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    status = error.status if isinstance(error, Refused) else 400
    if isinstance(error, HTTPException):
        status = error.status_code
    detail = f"{request.method} {request.url.path}: {error}"
    response = json_response({"detail": detail}, status)
    if status == 429:
        response.headers["Retry-After"] = "1"
    return response
