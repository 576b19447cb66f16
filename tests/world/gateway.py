"""HTTP inside the world, and scripted agents that call a gateway over it.

A site is an ASGI application of a process. A request waits for the network as a message does; a
killed site breaks its connections, and a client that leaves or dies disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from loop import Process, current
from network import Network

from async_rl.core.errors import AgentError
from async_rl.sessions.endpoint import Endpoint

_TEXT = re.compile(rb'"(?:content|text)":"([^"]*)"')
AGAIN = {"x-stainless-retry-count": "1"}
"""A request that is sent again, as the packages of OpenAI and Anthropic do."""
MOST_TRIES = 100
GONE = object()
"""The connection has ended."""


class Site:
    """The server of an application. on_sent: sees the keys of requests and the parts of answers."""

    def __init__(
        self, url: str, app: Any, network: Network, on_sent: Callable[[str, bytes], None]
    ) -> None:
        self.app, self.network, self.process = app, network, current()
        self.on_sent = on_sent
        self.context = contextvars.copy_context()
        network.sites[url] = self


class _Exchange(httpx.AsyncByteStream):
    """One request and its answer, as both sides see it."""

    def __init__(self, site: Site, client: Process, request: httpx.Request) -> None:
        self._site, self._client, self._request = site, client, request
        self._network = site.network
        self._to_site = client.name, site.process.name
        self._arrived = self._sent_s = 0.0
        self._parts: asyncio.Queue[Any] = asyncio.Queue()
        self._left = asyncio.Event()
        self._is_read = False
        site.process.on_death.append(lambda: self._parts.put_nowait(GONE))
        client.on_death.append(self._leave)

    async def open(self) -> httpx.Response:
        self._arrived = self._network.send(self._to_site, 0.0, self._start)
        head = await self._next()
        return httpx.Response(head["status"], headers=head["headers"], stream=self)

    def _start(self) -> None:
        if self._site.process.is_dead:
            self._parts.put_nowait(GONE)
            return
        work = self._serve()
        self._task = self._site.context.copy().run(asyncio.get_running_loop().create_task, work)

    async def _serve(self) -> None:
        url = self._request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._request.method,
            "path": url.path,
            "raw_path": url.raw_path,
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower(), v) for k, v in self._request.headers.raw],
            "client": None,
            "server": None,
        }
        await self._site.app(scope, self._receive, self._send)
        self._answer(GONE)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request.content, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            key = self._request.headers.get("authorization", "").removeprefix("Bearer ")
            self._site.on_sent(key, message.get("body", b""))
        self._answer(message)

    def _answer(self, message: Any) -> None:
        deliver = functools.partial(self._parts.put_nowait, message)
        # Timers of one moment have no order.
        self._sent_s = self._network.send(self._to_site[::-1], self._sent_s, deliver) + 1e-6

    async def _next(self) -> Any:
        part = await self._parts.get()
        if part is GONE:
            raise httpx.ReadError("the connection was reset", request=self._request)
        return part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            part = await self._next()
            more = part.get("more_body", False)
            yield part.get("body", b"")

    async def aclose(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._network.send(self._to_site, self._arrived + 1e-6, self._left.set)


class Transport(httpx.AsyncBaseTransport):
    """A client's connections inside the world."""

    network: Network
    on_sent: Callable[[str, bytes], None]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        url = f"{request.url.scheme}://{request.url.host}:{request.url.port}"
        site = self.network.sites.get(url)
        if site is None or site.process.is_dead:
            await asyncio.sleep(0.001)
            raise httpx.ConnectError("nobody listens", request=request)
        exchange = _Exchange(site, current(), request)
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                return await exchange.open()
        except TimeoutError as error:
            await exchange.aclose()
            raise httpx.ReadTimeout("no answer in time", request=request) from error
        except BaseException:
            await exchange.aclose()
            raise


@contextlib.contextmanager
def listen_again(host: str, file: Path) -> Iterator[str]:
    """Yield the address of the earlier life with this file, unless that still runs. As
    async_rl/wire/http.py, whose listener is the socket.
    """
    network, process = Transport.network, current()
    address, owner = network.ports.get(file, ("", process))
    if not address or not owner.is_dead:
        address = network.address().replace("tcp", "http")
    network.ports[file] = address, process
    yield address


@contextlib.asynccontextmanager
async def serving(app: Any, url: str, **_: Any) -> AsyncIterator[None]:
    """As async_rl/wire/http.py."""
    Site(url, app, Transport.network, Transport.on_sent)
    yield


class Agents:
    """As Workers: one scripted agent per session, which dies with the gateway.

    Scripts depend on the prompt and the sample only, so an agent that starts again repeats its
    calls.
    """

    def __init__(self, world: Any) -> None:
        self._world = world

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        return await _Agent(self._world, endpoint, task).run()

    async def close(self) -> None:
        pass


class _Agent:
    def __init__(self, world: Any, endpoint: Endpoint, task: dict[str, Any]) -> None:
        self._world, self._task = world, task
        self._script = random.Random(f"{world.seed} {task['prompt_id']} {task['sample']}")
        self._key = {"authorization": f"Bearer {endpoint.session_key}"}
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        url = endpoint.anthropic_base_url
        self._http = httpx.AsyncClient(
            transport=Transport(), base_url=url, headers=headers, timeout=None
        )
        self._messages = [{"role": "user", "content": task["prompt"]}]
        self._read: list[int] = []

    async def run(self) -> Any:
        acts = (self._chat, self._chat, self._stream, self._leave, self._retry, self._branch)
        if self._world.rng.random() < self._world.dying_agents:
            acts = (self._chat, self._die) if self._world.agents_die_late else (self._die,)
        try:
            for _ in range(self._script.choice((1, 2, 4))):
                await self._script.choice(acts)()
                await asyncio.sleep(self._world.rng.expovariate(1 / self._world.agent_s))
        except httpx.HTTPStatusError as error:
            # The session is full, which is an end like any other once there is an answer.
            if error.response.status_code != 400 or not self._read:
                raise AgentError(f"refused: {error}") from error
        if self._task["purpose"] == "eval":
            return float(min(self._world.history.tokens[id].identity for id in self._read))
        if self._script.random() < 0.5:
            await self._post("/v1/session/reward", 1.0, **self._key)
            return None
        return self._script.random()

    async def _post(self, path: str, body: Any, **headers: str) -> Any:
        while True:
            reply = await self._http.post(path, content=json.dumps(body), headers=headers)
            if reply.status_code != 503:
                reply.raise_for_status()
                return reply.json()
            await asyncio.sleep(1.0)

    def _body(self, **more: Any) -> dict[str, Any]:
        return {"model": "policy", "messages": self._messages, **more}

    async def _chat(self, **headers: str) -> None:
        reply = await self._post("/v1/chat/completions", self._body(), **headers)
        self._heard(reply["choices"][0]["message"]["content"])

    async def _branch(self) -> None:
        """Several answers to one request, which continues with the first of them."""
        limit = {"max_tokens": 8} if self._script.random() < 0.8 else {}
        reply = await self._post("/v1/chat/completions", self._body(n=2, **limit))
        for choice in reply["choices"][::-1]:
            self._note(choice["message"]["content"])
        self._heard(reply["choices"][0]["message"]["content"])

    async def _retry(self) -> None:
        """Give up on the answer, then request it again as the packages do."""
        try:
            async with asyncio.timeout(self._world.rng.expovariate(1.0)):
                await self._chat()
                return
        except TimeoutError:
            pass
        await self._chat(**AGAIN)

    async def _stream(self, **headers: str) -> None:
        text = ""
        path, body = "/v1/chat/completions", self._body(stream=True)
        async with self._http.stream("POST", path, json=body, headers=headers) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line[6:])
                    if "error" in delta:
                        raise AgentError(f"the stream broke: {delta}")
                    for choice in delta["choices"]:
                        text += choice["delta"].get("content") or ""
        self._heard(text)

    async def _leave(self) -> None:
        """Disconnect from a stream while its answer is written, and request something else."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._world.rng.expovariate(1.0)):
                await self._stream()
                return
        self._messages[-1] = {"role": "user", "content": f"else {len(self._messages)}"}
        await self._chat()

    async def _die(self) -> None:
        raise AgentError("the world let this agent die")

    # ---- what a program outside the run does differently

    async def play(self) -> None:
        """Run as a program that took the session: it ends the session, and repeats what is lost."""
        outcome = {}
        try:
            score = await self.run()
            if score is not None:
                await self._post("/v1/session/reward", score, **self._key)
        except AgentError as error:
            outcome = {"error": str(error)}
            refused = error.__cause__
            if isinstance(refused, httpx.HTTPStatusError) and refused.response.status_code == 401:
                known = self._world.history.tokens
                self._world.history.answers.ended += [known[id].call for id in self._read[-1:]]
        await self._post("/v1/session/end", outcome, **self._key)

    def _note(self, text: str) -> None:
        self._read += map(int, text.split())

    def _heard(self, text: str) -> None:
        self._note(text)
        self._messages.append({"role": "assistant", "content": text})
        self._messages.append({"role": "user", "content": f"again {len(self._messages)}"})


class Program(_Agent):
    """An agent outside the run, which takes sessions and goes on when a gateway starts again."""

    @classmethod
    async def work(cls, world: Any, file: Path) -> None:
        """Take one session after another of the gateway with this file."""
        async with httpx.AsyncClient(transport=Transport(), timeout=90.0) as http:
            while True:
                with contextlib.suppress(OSError, httpx.HTTPError):
                    gateway = json.loads(file.read_text())
                    key = {"authorization": f"Bearer {gateway['api_key']}"}
                    wanted = json.dumps({"wait_s": 30})
                    url = gateway["sessions_url"]
                    reply = await http.post(url, content=wanted, headers=key)
                    if reply.status_code == 201:
                        fields = reply.json()
                        task = fields.pop("task")
                        del fields["object"]
                        # A session that was given to another program is over for this one.
                        await cls(world, Endpoint(**fields), task).play()
                await asyncio.sleep(0.5)

    async def _post(self, path: str, body: Any, **headers: str) -> Any:
        return await self._again(super()._post, path, body, **headers)

    async def _stream(self, **headers: str) -> None:
        await self._again(super()._stream, **headers)

    async def _again(self, call: Any, *arguments: Any, **headers: str) -> Any:
        for _ in range(MOST_TRIES):
            try:
                return await call(*arguments, **headers)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code != 503:
                    raise
                await asyncio.sleep(1.0)
                headers |= AGAIN
        raise httpx.ReadError("the gateway stays away")


def ids_in(body: bytes) -> list[int]:
    """Return the tokens of the texts in a part of an answer."""
    return [int(word) for text in _TEXT.findall(body) for word in text.split()]
