"""The web view's HTTP server: pages of runs, drawn on the server, with no script needed to read
them.

Invariants: answers GET only and writes nothing; every text is escaped by the templates; the browser
may load nothing but this server's own style and script (Content-Security-Policy); every request
needs the token, as `?token=` once, then as a cookie, because other users of the machine reach
loopback too. A page of another site that points its own name at 127.0.0.1 (DNS rebinding) has no
cookie for that name.
"""

import asyncio
import hmac
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from async_rl.core.errors import AsyncRLError, ConfigError, Unavailable
from async_rl.runs.report import Report, duration, number
from async_rl.runs.samples import verdicts_of
from async_rl.runs.view import charts, pages
from async_rl.runs.view.library import Library
from async_rl.runs.view.pages import Query, Visit
from async_rl.wire.http import listen, serving, url_of

_FILES = Path(__file__).parent
_COOKIE = "async-rl-view"
_COOKIE_LETTERS = 6
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
# Address, template and content of each page.
_PAGES = (
    ("/", "overview.html", pages.overview),
    ("/curves", "curves.html", pages.curves_page),
    ("/runs/{run}", "run.html", pages.run_page),
    ("/runs/{run}/samples", "samples.html", pages.sample_list),
    ("/runs/{run}/groups/{group_id:int}", "group.html", pages.group_page),
    ("/runs/{run}/plan", "report.html", pages.plan_page),
    ("/runs/{run}/certificate", "report.html", pages.certificate_page),
    ("/compare", "report.html", pages.compare_page),
)


def build_app(library: Library, *, token: str) -> ASGIApp:
    """Return the ASGI application. token: required of every request."""
    templates = environment()

    def page(address: str, template: str, content: Callable[[Visit], pages.Content]) -> Route:
        def endpoint(request: Request) -> Response:  # not async: Starlette runs it in a thread
            values = content(_visit(library, request))
            return HTMLResponse(templates.get_template(template).render(values))

        return Route(address, endpoint)

    def failed(request: Request, error: Exception) -> Response:
        text = templates.get_template("problem.html").render(problem=str(error))
        return HTMLResponse(text, status_code=503 if isinstance(error, Unavailable) else 404)

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        response = _refusal(request, token) or await answer(request)
        response.headers.update(_HEADERS)
        return response

    return Starlette(
        routes=[
            *(page(*row) for row in _PAGES),
            Mount("/static", StaticFiles(directory=_FILES / "static")),
        ],
        exception_handlers={AsyncRLError: failed},
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
    )


def serve(
    directory: Path, *, host: str, port: int, token: str, ready: Callable[[str], None]
) -> None:
    """Serve the runs of a directory until Ctrl-C or SIGTERM. ready: called with the server's URL.

    Raises ConfigError if the address cannot be bound.
    """

    async def until_stopped() -> None:
        stopping = asyncio.Event()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, stopping.set)
        with listen(host, port) as listener:
            ready(url_of(listener))
            app = build_app(Library(directory), token=token)
            # A page that is still computed must not delay Ctrl-C.
            async with serving(app, listener, close_s=1):
                await stopping.wait()

    asyncio.run(until_stopped())


def page_of(report: Report) -> str:
    """Return a report as one page with its style, without scripts or other files."""
    template = environment().get_template("report.html")
    return template.render(layout="alone.html", reports=[report])


def _visit(library: Library, request: Request) -> Visit:
    """Read the address of a page. Raises ConfigError for a value that a parameter cannot have."""
    # A form sends its empty fields too.
    given: dict[str, Any] = {name: value for name, value in request.query_params.items() if value}
    given["run"] = request.query_params.getlist("run")
    try:
        query = msgspec.convert(given, Query, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the address of this page is wrong: {error}") from error
    return Visit(library=library, path=request.path_params, query=query)


def _refusal(request: Request, token: str) -> Response | None:
    """Return the answer to a request without the token, or to the first with it."""

    def is_token(given: str) -> bool:
        # In constant time: the time of an answer must not show how much of a guess is right.
        return hmac.compare_digest(given.encode(), token.encode())

    # Browsers send a cookie to every port of a host: two servers need two names.
    cookie = f"{_COOKIE}-{token[:_COOKIE_LETTERS]}"
    if is_token(request.query_params.get("token", "")):
        # Out of the address, where it would stay in the browser's history.
        rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
        response = RedirectResponse(f"{request.url.path}?{urlencode(rest)}", status_code=303)
        # Scripts cannot read it, and no other site can send it.
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    if is_token(request.cookies.get(cookie, "")):
        return None
    return Response("the token is missing or wrong; open the printed link\n", status_code=401)


def environment() -> jinja2.Environment:
    """Return the templates with the filters that they use."""
    environment = jinja2.Environment(
        # A page without a server includes the style sheet.
        loader=jinja2.FileSystemLoader([_FILES / "templates", _FILES / "static"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name must fail in a test, not leave a gap in a page.
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "duration": duration}
    environment.globals |= {
        "now": time.time,
        "frame": charts.FRAME,
        "line_chart": charts.line_chart,
        "layout": "layout.html",
        "verdicts_of": verdicts_of,
    }
    return environment
