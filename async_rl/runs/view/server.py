"""The web view's HTTP server: pages of runs, drawn on the server, with no script needed to read
them.

Invariants: answers GET only and writes nothing; every text is escaped by the templates; the browser
may load nothing but this server's own style and script (Content-Security-Policy); on loopback only
requests that name a loopback host are answered, so that a page from elsewhere cannot read runs by
DNS rebinding; on any other address every request needs the token, as `?token=` once, then as a
cookie.
"""

from __future__ import annotations

import asyncio
import hmac
import signal
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.buffer.store.browse import Filter
from async_rl.core.errors import AsyncRLError, ConfigError, Unavailable
from async_rl.runs.report import Report
from async_rl.runs.view import charts, export, pages
from async_rl.runs.view.library import Library, RunView
from async_rl.runs.view.texts import duration, number, size
from async_rl.wire.http import listen, serving

_COOKIE = "async-rl-view"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_MOST_RUNS = 8  # of one page of curves: as many as there are colours
_STATIC = {"style.css": "text/css", "view.js": "text/javascript"}
_MOST_SMOOTHING = 0.99


def build_app(library: Library, *, token: str) -> ASGIApp:
    """Return the ASGI application. token: required of every request; empty on loopback."""
    templates = environment()

    def run_of(request: Request) -> RunView:
        return library.run(request.path_params["run"])

    def prompt(request: Request) -> pages.Content:
        purpose = request.query_params.get("purpose", "train")
        prompt_id = request.query_params.get("prompt_id", "")
        return pages.prompt_page(run_of(request), prompt_id, purpose)

    builders: dict[str, Callable[[Request], pages.Content]] = {
        "overview": lambda request: pages.overview(library),
        "curves": lambda request: _curves(library, request),
        "run": lambda request: pages.run_page(run_of(request), _whole(request, "step")),
        "samples": lambda request: pages.sample_list(run_of(request), _filter(request)),
        "group": lambda request: pages.group_page(run_of(request), request.path_params["group_id"]),
        "prompt": prompt,
        "pair": lambda request: _pair(library, request),
        "plan": lambda request: pages.plan_page(
            run_of(request), request.query_params.get("set", "")
        ),
        "compare": lambda request: {"reports": [pages.comparison(*_two_runs(library, request))]},
    }

    def page(name: str) -> Route:
        template = templates.get_template(_TEMPLATES.get(name, f"{name}.html"))

        def endpoint(request: Request) -> Response:  # not async: Starlette runs it in a thread
            content = builders[name](request)
            return HTMLResponse(template.render(page=name, request=request, **content))

        return Route(_PATHS[name], endpoint, methods=["GET"])

    def failed(request: Request, error: Exception) -> Response:
        status = 503 if isinstance(error, Unavailable) else 404
        template = templates.get_template("problem.html")
        text = template.render(page="problem", request=request, problem=str(error))
        return HTMLResponse(text, status_code=status)

    return Starlette(
        routes=[
            *(page(name) for name in _PATHS),
            Route(
                "/runs/{run}/trajectories.{form}",
                lambda request: _download(run_of(request), request),
                methods=["GET"],
            ),
            Route("/static/{name}", _static, methods=["GET"]),
        ],
        exception_handlers={AsyncRLError: failed},
        middleware=[Middleware(_Guard, token=token)],
    )


def serve(
    directory: Path, *, host: str, port: int, token: str, ready: Callable[[int], None]
) -> None:
    """Serve the runs of a directory until Ctrl-C or SIGTERM. ready: called with the bound port.

    Raises ConfigError if the address cannot be bound.
    """

    async def until_stopped() -> None:
        stopping = asyncio.Event()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, stopping.set)
        with listen(host, port) as listener:
            ready(listener.getsockname()[1])
            app = build_app(Library(directory), token=token)
            async with serving(app, listener, close_s=1):
                await stopping.wait()

    asyncio.run(until_stopped())


def _download(run: RunView, request: Request) -> Response:
    suffix = request.path_params["form"]
    if suffix not in export.FORMS:
        raise ConfigError(f"no such format: {suffix}; there are {', '.join(export.FORMS)}")
    rows = export.rows(run.path, run.decode, _filter(request))
    return StreamingResponse(
        export.FORMS[suffix].stream(rows),
        media_type=export.FORMS[suffix].media_type,
        headers={"content-disposition": f'attachment; filename="{run.name}.{suffix}"'},
    )


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise ConfigError(f"no such file: {name}")
    return Response(static_text(name), media_type=_STATIC[name])


def static_text(name: str) -> str:
    """Return a style sheet or script of the pages."""
    return resources.files(__package__).joinpath("static", name).read_text()


def page_of(report: Report) -> str:
    """Return a report as one page with its style, without scripts or other files."""
    template = environment().get_template("report.html")
    style = static_text("style.css")
    return template.render(layout="alone.html", style=style, reports=[report])


_PATHS = {
    "overview": "/",
    "curves": "/curves",
    "run": "/runs/{run}",
    "samples": "/runs/{run}/samples",
    "group": "/runs/{run}/groups/{group_id:int}",
    "prompt": "/runs/{run}/prompt",
    "pair": "/pair",
    "plan": "/runs/{run}/plan",
    "compare": "/compare",
}
_TEMPLATES = {"plan": "report.html", "compare": "report.html"}


class _Guard:
    """Refuses requests without the token or from another site, and adds the security headers."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        response = self._refusal(Request(scope))
        await (response or self._app)(scope, receive, sending)

    def _refusal(self, request: Request) -> Response | None:
        if not self._token:
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name in _LOOPBACK:
                return None
            return Response("open this page as localhost or 127.0.0.1\n", status_code=403)
        given = request.query_params.get("token", "")
        if given and self._is_token(given):
            # Out of the address, where it would stay in the browser's history.
            rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
            response = RedirectResponse(f"{request.url.path}?{urlencode(rest)}", status_code=303)
            response.set_cookie(_COOKIE, given, httponly=True, samesite="strict")
            return response
        if self._is_token(request.cookies.get(_COOKIE, "")):
            return None
        return Response("the token is missing or wrong; open the printed link\n", status_code=401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _curves(library: Library, request: Request) -> pages.Content:
    names = request.query_params.getlist("run")
    if not names:
        raise ConfigError("choose runs: mark them on the first page")
    if len(names) > _MOST_RUNS:
        raise ConfigError(f"{len(names)} runs are chosen; choose at most {_MOST_RUNS}")
    try:
        smoothing = float(request.query_params.get("smoothing", "0"))
    except ValueError:
        smoothing = 0.0
    return pages.curves(
        [library.run(name) for name in names],
        smoothing=min(max(smoothing, 0.0), _MOST_SMOOTHING),
        x="time_s" if request.query_params.get("x") == "time_s" else "step",
        section=request.query_params.get("section", ""),
    )


def _two_runs(library: Library, request: Request) -> tuple[RunView, RunView]:
    names = request.query_params.getlist("run")
    if len(names) != 2:
        raise ConfigError(f"{len(names)} runs are chosen; choose two")
    return library.run(names[0]), library.run(names[1])


def _pair(library: Library, request: Request) -> pages.Content:
    prompt_id = request.query_params.get("prompt_id", "")
    purpose = request.query_params.get("purpose", "train")
    return pages.pair_page(*_two_runs(library, request), prompt_id, purpose)


def _filter(request: Request) -> Filter:
    """Return the filter of a page's address. Raises ConfigError for a value that it cannot have."""
    values: dict[str, Any] = {
        name: value
        for name, value in request.query_params.items()
        if name in Filter.__struct_fields__ and value
    }
    for flag in ("failed", "truncated", "stored"):
        values[flag] = flag in values
    try:
        return msgspec.convert(values, Filter, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the address of this page is wrong: {error}") from error


def _whole(request: Request, name: str) -> int | None:
    value = request.query_params.get(name, "")
    return int(value) if value.isdecimal() else None


def environment() -> jinja2.Environment:
    """Return the templates with the filters that they use."""
    folder = Path(str(resources.files(__package__).joinpath("templates")))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "duration": duration, "size": size}
    environment.globals |= {
        "now": time.time,
        "as_query": lambda chosen, **changes: urlencode(pages.as_query(chosen, **changes)),
        "frame": charts.FRAME,
        "line_chart": charts.line_chart,
        "layout": "layout.html",
    }
    return environment
