"""A played learner and played generators, and the real front around them."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from async_rl.core.errors import DataError, Unavailable
from async_rl.protocol.generator import Completion, Scores
from async_rl.protocol.service import CHANGING, Execute, Executed, LoadSlot, Sample, Sampled
from async_rl.service import forms
from async_rl.service.desk import Desk
from async_rl.service.front import build_app
from async_rl.service.proto import (
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
    decode,
    encode_batch,
    forward_backward_output,
    parse_forward_backward,
)
from async_rl.service.sampling import Model
from async_rl.service.store import Store

KEY = "tml-test"
MODEL = Model(
    name="local/tiny", tokenizer="local/tiny", vocab_size=100, context_tokens=64, most_rank=32
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass
class State:
    """A run in the played learner. chain: a hash of what has changed it."""

    version: int = 0
    chain: str = ""


class Played:
    """The processes behind the front.

    executed: run, number and kind of what was executed, in order, with repetitions; steps: numbers
    of optimizer steps in the metrics; request_s: what a request takes. gate: a request waits for it
    and sets `has_begun` before.
    """

    def __init__(self, *, request_s: float = 0.0) -> None:
        self.memory: dict[str, State] = {}
        self.executed: list[tuple[str, int, str]] = []
        self.steps: list[int] = []
        self.released: list[str] = []
        self.sampled: list[Sample] = []
        self.loaded: list[tuple[str, str, int]] = []
        self.gate: asyncio.Event | None = None
        self.has_begun = asyncio.Event()
        self.clock = Clock()
        self._request_s = request_s
        self._has_left = False

    def kill_learner(self) -> None:
        self.memory.clear()
        self._has_left = True

    async def execute(self, request: Execute) -> Executed:
        self.has_begun.set()
        if self.gate is not None:
            await self.gate.wait()
        self._notice()
        self.clock.now_s += self._request_s
        try:
            executed = self._executed(request)
        except DataError as error:
            version = self.memory[request.run_id].version
            executed = Executed(body=b"", version=version, error=str(error))
        self._notice()
        return executed

    def _notice(self) -> None:
        """Let the call that notices the end of the learner fail; the next has its successor."""
        if self._has_left:
            self._has_left = False
            raise Unavailable("the learner left")

    def _executed(self, request: Execute) -> Executed:
        kind, run_id, path = request.operation, request.run_id, Path(request.path) / "state.json"
        if kind == "restore":
            if self.memory.pop(run_id, None):
                self.released.append(run_id)
            if request.path and not path.exists():
                return Executed(body=b"", version=0, error=f"{path.parent.name} is damaged")
            if request.path:
                self.memory[run_id] = State(**json.loads(path.read_text()))
            return Executed(body=b"", version=0)
        if kind in ("create_model", "load_weights"):
            self.memory.setdefault(run_id, State())
        state = self.memory[run_id]
        if kind != "save_state":
            self.executed.append((run_id, _number(request), kind))
        body, tokens = b"", 1
        if kind in ("forward", "forward_backward"):
            parsed = parse_forward_backward(request.body)
            if parsed.loss_fn not in ("cross_entropy", "importance_sampling", "ppo"):
                raise DataError(f"unknown loss {parsed.loss_fn!r}")
            tokens = sum(len(datum.tokens) for datum in parsed.data)
            seed = int(hashlib.sha256(state.chain.encode()).hexdigest()[:4], 16)
            rows = [-np.full(len(datum.tokens), seed / 65536, np.float32) for datum in parsed.data]
            body = forward_backward_output(rows, {"loss:sum": float(seed)})
        if kind == "optim_step":
            forms.read(request.body, forms.OptimStep)
            state.version += 1
            body = json.dumps({"metrics": {"chain": int(state.chain[:6] or "0", 16)}}).encode()
            if request.step:
                self.steps.append(request.step)
        if kind.startswith("save"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dataclasses.asdict(state)))
        if kind == "load_weights":
            loaded = json.loads(path.read_text())
            state.chain, state.version = loaded["chain"], loaded["version"]
        if kind in CHANGING:
            digest = hashlib.sha256(f"{state.chain} {kind}".encode())
            digest.update(request.body)
            state.chain = digest.hexdigest()
        if kind == "unload_model":
            self.memory.pop(run_id)
        return Executed(body=body, version=state.version, tokens=tokens)

    async def sample(self, request: Sample) -> Sampled:
        self.sampled.append(request)
        if request.temperature == 99:
            raise DataError("the engine refuses this temperature")
        width, count = len(request.token_ids), request.max_tokens
        sequences = []
        for index in range(request.num_samples):
            ids = (np.arange(count) + int(request.token_ids.sum()) + index) % MODEL.vocab_size
            versions = np.full(count, request.version)
            if request.policy:
                # As if the weights had changed in the middle of the sequence.
                loaded = [version for name, _, version in self.loaded if name == request.policy]
                versions[: count // 2] = min(loaded)
            shape = (count, request.num_top)
            likeliest = Scores(ids=np.ones(shape, np.int32), logprobs=np.full(shape, -0.5, "f4"))
            sequence = Completion(
                token_ids=ids.astype(np.int32),
                logprobs=(-np.arange(count) / 7 - index).astype(np.float32),
                versions=versions.astype(np.int32),
                is_truncated=index % 2 == 1,
                likeliest=likeliest if request.num_top else None,
            )
            sequences.append(sequence)
        top = request.num_prompt_top or 0
        ids = np.zeros((width, 1 + top), np.int32)
        ids[1:, 1:] = 1
        logprobs = np.full(ids.shape, -1.5, np.float32)
        logprobs[:, 0] = -np.arange(width)
        logprobs[0] = np.nan
        columns = 0 if request.num_prompt_top is None else None
        return Sampled(
            sequences=sequences, prompt=Scores(ids=ids[:, :columns], logprobs=logprobs[:, :columns])
        )

    async def load(self, request: LoadSlot) -> None:
        assert Path(request.adapter).is_dir()
        self.loaded.append((request.policy, request.adapter, request.version))


def _number(request: Execute) -> int:
    if request.operation in ("forward", "forward_backward"):
        return int(decode(request.body).seq_id)
    return int(json.loads(request.body).get("seq_id", 0))


def open_desk(
    directory: Path,
    played: Played,
    *,
    clock: Clock | None = None,
    prefix: str = "",
    poll_s: float = 0.0,
    model: Model = MODEL,
) -> Desk:
    played.clock = clock or played.clock
    numbers = itertools.count(1)
    store = Store(
        directory,
        now=played.clock,
        new_id=lambda: f"{prefix}{next(numbers):016x}",
        poll_s=poll_s,
    )
    return Desk(store, played, model)


@contextlib.asynccontextmanager
async def client_of(desk: Desk) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(desk, KEY))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://service/api/v1/", headers={"X-API-Key": KEY}
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def working(desk: Desk) -> AsyncIterator[asyncio.Task[None]]:
    """Let the desk execute requests; the task ends early only if it fails."""
    task = asyncio.create_task(desk.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        desk.store.close()


def batch(
    run: str,
    seq_id: int,
    *rows: list[int],
    loss: str = "cross_entropy",
    forward_only: bool = False,
) -> bytes:
    """A request of forward_backward, in protobuf."""
    data = [
        Datum(tokens=np.array(row), inputs={"target_tokens": np.array([*row[1:], 1])})
        for row in rows
    ]
    more = ForwardBackwardRequest(forward_only=forward_only)
    return encode_batch(data, run, seq_id, loss, {}) + bytes(more.SerializeToString())


class Front:
    """Calls of the API. desk: behind it."""

    def __init__(self, http: httpx.AsyncClient, desk: Desk) -> None:
        self.http = http
        self.desk = desk
        self.session_id = ""

    async def session(self) -> str:
        reply = await self.http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
        self.session_id = reply.json()["session_id"]
        return self.session_id

    async def create(self, model_seq_id: int = 0, **more: Any) -> str:
        """A new run whose creation has been executed."""
        session_id = self.session_id or await self.session()
        body = {"session_id": session_id, "model_seq_id": model_seq_id, "base_model": MODEL.name}
        reply = await self.http.post(
            "create_model", json=body | {"lora_config": {"rank": 8}} | more
        )
        assert reply.status_code == 200, reply.text
        await self.result(reply.json()["request_id"])
        return str(reply.json()["model_id"])

    async def post(self, path: str, /, **body: Any) -> str:
        """The id of an accepted request."""
        reply = await self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["request_id"])

    async def step(self, run: str, seq_id: int) -> str:
        return await self.post("optim_step", model_id=run, seq_id=seq_id, adam_params={})

    async def batch(self, run: str, seq_id: int, *rows: list[int], **more: Any) -> str:
        reply = await self.http.post("forward_backward", content=batch(run, seq_id, *rows, **more))
        assert reply.status_code == 200, reply.text
        return str(reply.json()["request_id"])

    async def wait(self, request_id: str) -> httpx.Response:
        """The answer, as soon as it is there."""
        for _ in range(2000):
            reply = await self.http.post("retrieve_future", json={"request_id": request_id})
            assert reply.status_code == 200, reply.text
            is_json = reply.headers["content-type"] == "application/json"
            if not is_json or reply.json().get("type") != "try_again":
                return reply
            await asyncio.sleep(0)
        raise AssertionError(f"{request_id} has no answer")

    async def result(self, request_id: str) -> Any:
        return (await self.wait(request_id)).json()

    async def settle(self) -> None:
        """Let the desk do what it can."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def forward_backward_result(self, request_id: str) -> Any:
        return await self._decoded(request_id, ForwardBackwardOutput)

    async def samples(self, request_id: str) -> Any:
        return await self._decoded(request_id, SampleResponse)

    async def _decoded(self, request_id: str, kind: Any) -> Any:
        reply = await self.wait(request_id)
        assert reply.headers["content-type"] == "application/x-protobuf", reply.text
        return kind.FromString(reply.content)


@contextlib.asynccontextmanager
async def front(
    directory: Path, played: Played, *, desk: Desk | None = None
) -> AsyncIterator[Front]:
    """The real app around a desk that executes requests, until the block exits."""
    desk = desk or open_desk(directory, played)
    async with working(desk), client_of(desk) as http:
        api = Front(http, desk)
        # The desk's tasks start.
        await api.settle()
        yield api


def folder(run: str) -> str:
    return run.replace(":", ".")
