"""The heavy parts of a run, one fake each: engine, rollouts with verdicts, trainer, store threads,
launcher. Everything else in the world is the product's.

Weights have an identity, a number that no two steps share: weights of one version that two lives of
the learner trained are different weights. A response's tokens carry the identity as their id.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from loop import Process, current, kill, send_signal

from async_rl.batching.batch import BatchPart
from async_rl.buffer.changes import Change
from async_rl.buffer.store import store
from async_rl.buffer.store.writer import Flushes, finish
from async_rl.core.checksums import complete, sums_of
from async_rl.core.errors import (
    AsyncRLError,
    EngineDead,
    InfrastructureError,
    NonFiniteError,
    RestartNeeded,
    StalenessError,
    Unavailable,
    root_cause,
)
from async_rl.core.heads import GroupHead
from async_rl.core.os import RESTART_CODE
from async_rl.core.types import (
    NO_VERSION,
    CodeProblem,
    FloatArray,
    Group,
    IntArray,
    Prompt,
    Purpose,
    Sampling,
    Score,
    Ticket,
    Trajectory,
    Verdict,
)
from async_rl.data.prompt_file import PromptOrder
from async_rl.planning.topology import ProcessSpec
from async_rl.protocol.generator import Completion, LoadReport
from async_rl.protocol.weights import Manifest, TensorEntry
from async_rl.runtime import main as child_main
from async_rl.training import operations
from async_rl.training.operations import Fetch, Operation, Restore, Save, Step
from async_rl.training.taking import Parts

VOCABULARY = 100_000
NUM_PROMPTS = 7
NUM_HELD_OUT = 3
NO_GAIN = {"policy/effective_sequences": 1.0, "policy/step_scale": 1.0}


class Prompts:
    """Training prompts over and over, and those of an evaluation."""

    vocabulary_size = VOCABULARY
    num_train = NUM_PROMPTS
    num_held_out = NUM_HELD_OUT

    def __init__(self, seed: int) -> None:
        self.order = PromptOrder(seed, NUM_PROMPTS, shuffle=True)
        self.rows = [_prompt(f"t{n}") for n in range(NUM_PROMPTS)]
        self.held_out = [_prompt(f"e{n}") for n in range(NUM_HELD_OUT)]

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        if purpose is Purpose.TRAIN:
            return self.train(self.order.index(index))
        return self.held_out[index]

    def train(self, row: int) -> Prompt:
        return self.rows[row]


def _prompt(name: str) -> Prompt:
    return Prompt(
        prompt_id=name,
        text=name,
        token_ids=np.array([1, 2], np.int32),
        data_source="world",
        problem=CodeProblem(tests=[]),
    )


class Tokenizer:
    """A token is a word, its number. Other words become tokens that no policy writes."""

    chat_template = None
    eos_token = ""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + zlib.crc32(word.encode()) % 8 for word in text.split()]}


class Engine:
    """Has weights; `Rollouts` reads them token by token. process: its generator."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.version = NO_VERSION
        self.identity = -1
        self.is_broken = False
        self._life = 0

    async def load_weights(self, manifest: Manifest, source: Any) -> LoadReport:
        rng = self._world.rng
        name = current().name
        if name in self._world.stops_in_push:
            self._world.stop(name, self._world.stops_in_push.pop(name))
        await asyncio.sleep(rng.expovariate(1 / self._world.load_s))
        if rng.random() < self._world.broken_loads:
            self.is_broken = True
            raise EngineDead("the world broke this engine")
        self._world.history.loads(self._life, manifest.life)
        self._life = max(self._life, manifest.life)
        self.version, self.identity = manifest.version, manifest.checksum
        return LoadReport(version=self.version, pause_s=0.001)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Write tokens that no other request has, four at a time."""
        world = self._world
        for index in range(num_samples):
            size = 1 + int(world.rng.expovariate(1 / 20))
            is_truncated = size >= sampling.max_new_tokens
            ids: list[int] = []
            limit = sampling.max_new_tokens
            call = world.history.answers.begin(request_id, prompt_token_ids, limit)
            while len(ids) < min(size, sampling.max_new_tokens):
                await asyncio.sleep(world.rng.expovariate(1 / world.token_s))
                if self.is_broken:
                    raise Unavailable("the engine is broken")
                new = min(4, size - len(ids), sampling.max_new_tokens - len(ids))
                ids += world.history.written(call, self.identity, self.version, new)
            tokens = [world.history.tokens[id] for id in ids]
            yield Completion(
                token_ids=np.array(ids, np.int32),
                logprobs=np.array([token.logprob for token in tokens], np.float32),
                versions=np.array([token.version for token in tokens], np.int32),
                is_truncated=is_truncated,
                index=index,
            )

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        return logprobs_of(self.identity, rows)

    async def weight_devices(self) -> list[str]:
        return ["cpu"]

    async def sleep(self) -> None:
        pass

    async def close(self) -> None:
        pass


def logprobs_of(identity: int, rows: Sequence[IntArray]) -> list[FloatArray]:
    return [np.full(len(row), -1.0 - identity, np.float32) for row in rows]


class Rollouts:
    """Groups with random lengths, whose tokens come one by one, and verdicts that take a while."""

    world: Any

    def __init__(self, config: Any, *, name: str, **_: Any) -> None:
        self._name = name

    async def follow_verifiers(self, directory: Any) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass

    async def is_outage(self, failure: BaseException) -> bool:
        return False

    async def group(self, ticket: Ticket, engine: Any, *, written: Callable[[], None]) -> Group:
        world, rng = self.world, self.world.rng
        lengths = [1 + min(9, int(rng.expovariate(1 / 3))) for _ in range(ticket.num_samples)]
        samples: list[list[tuple[int, int]]] = [[] for _ in lengths]
        for position in range(max(lengths)):
            await asyncio.sleep(rng.expovariate(1 / world.token_s))
            if engine.is_broken:
                raise EngineDead("the engine is broken")
            for sample, length in zip(samples, lengths, strict=True):
                if position < length:
                    sample.append((engine.version, engine.identity))
        written()
        await asyncio.sleep(rng.expovariate(1 / world.verdict_s))
        if rng.random() < world.failed_verdicts:
            raise InfrastructureError("the world lost this verdict")
        is_held_out = ticket.purpose is Purpose.EVAL
        return Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            prompt_id=ticket.prompt.prompt_id,
            purpose=ticket.purpose,
            data_source=ticket.prompt.data_source,
            generator=self._name,
            admitted_version=ticket.admitted_version,
            trajectories=[
                _trajectory(sample, is_held_out=is_held_out, passes=rng.random() < 0.5)
                for sample in samples
            ],
            generation_s=1.0,
        )


def _trajectory(written: list[tuple[int, int]], *, is_held_out: bool, passes: bool) -> Trajectory:
    """written: version and identity of the weights of each token."""
    versions, identities = zip(*written, strict=True)
    # So the mean reward of an evaluation says which weights it is about.
    reward = float(min(identities)) if is_held_out else float(passes)
    verdict = Verdict.PASS if passes else Verdict.WRONG_ANSWER
    return Trajectory(
        token_ids=np.array([1, 2, *identities], np.int32),
        prompt_length=2,
        loss_mask=np.array([False, False] + [True] * len(versions)),
        behavior_logprobs=np.array([0.0, 0.0] + [-0.5] * len(versions), np.float32),
        versions=np.array([NO_VERSION, NO_VERSION, *versions], np.int32),
        is_truncated=False,
        score=Score(reward=reward, parts={}, verdicts=(verdict,), latency_s=0.01),
    )


class Pool:
    """As TrainingPool. Its weights are an identity; each step makes a new one."""

    world: Any
    adapter = None

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.identity = 0

    @classmethod
    async def open(cls, make_trainer: Any, life: str, parts: Parts, others: Any = ()) -> Self:
        await asyncio.sleep(cls.world.rng.expovariate(1.0))
        return cls(parts)

    async def fetch(
        self, heads: Sequence[GroupHead], train_version: int, *, life: int, timeout_s: float
    ) -> None:
        request = Fetch(pool="", life=life, train_version=train_version, heads=list(heads))
        await self.parts.fetch(request, [0] * sum(len(head.samples) for head in heads))

    async def lead(self, operation: Operation) -> Any:
        match operation:
            case Step(version=version):
                return await self._step(version)
            case Save(directory=directory, version=version):
                return await self._save(Path(directory), version)
            case Restore(directory=directory):
                return self._load(Path(directory))
            case operations.Score(rows=rows):
                return logprobs_of(self.identity, rows)
        return None

    async def _step(self, version: int) -> Any:
        world = self.world
        part: BatchPart = self.parts.pop(version)
        await asyncio.sleep(world.rng.expovariate(1 / world.step_s))
        tokens = np.concatenate([t.versions[t.prompt_length :] for t in part.trajectories])
        world.history.offered(version, part)
        if tokens.max() > version:
            raise StalenessError(f"a token of version {tokens.max()} in the batch of {version}")
        if world.rng.random() < world.bad_batches:
            raise NonFiniteError("the world made this batch bad")
        self.identity = next(world.identities)
        world.history.trained(version, self.identity, part)
        return SimpleNamespace(scalars={"tokens/trained": float(len(tokens)), **NO_GAIN})

    async def publish(self, version: int, *, compares: bool) -> Manifest:
        embedding = TensorEntry(
            name="embed", dtype="float32", shape=[VOCABULARY, 1], offset=0, size_bytes=4
        )
        return Manifest(
            version=version, path="", tensors=[embedding], total_bytes=4, checksum=self.identity
        )

    async def _save(self, directory: Path, version: int) -> Future[None]:
        future: Future[None] = Future()
        content = {"version": version, "identity": self.identity}
        partial = directory.with_name(directory.name + ".partial")

        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

        def write() -> None:
            (partial / "weights.json").write_text(json.dumps(content))
            complete(partial, directory, sums_of(partial))
            self.world.history.saved(version)
            future.set_result(None)

        delay_s = self.world.rng.expovariate(1 / self.world.save_s)
        asyncio.get_running_loop().call_later(delay_s, write)
        return future

    def _load(self, directory: Path) -> int:
        content = json.loads((directory / "weights.json").read_text())
        self.identity = content["identity"]
        version: int = content["version"]
        return version

    def close(self) -> None:
        pass


class Store(store.Store):
    """The store without threads: each commit is a callback some milliseconds later."""

    world: Any

    def __init__(self, run_dir: Path, *, clock: Callable[[], float]) -> None:
        super().__init__(run_dir, clock=clock)
        self._is_due_soon = False
        # The kernel closes the files of a killed process and releases its lock.
        current().on_death.append(self._files.close)
        self.world.opened_store(self._path)

    def put(self, statements: Iterable[str], parameters: Mapping[str, Any]) -> None:
        super().put(statements, parameters)
        self._schedule()

    def put_changes(self, changes: list[Change], now_s: float) -> None:
        super().put_changes(changes, now_s)
        self._schedule()

    def end_after_commit(self, flushes: Flushes) -> None:
        super().end_after_commit(flushes)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due_soon:
            self._is_due_soon = True
            delay_s = self.world.rng.expovariate(1 / self.world.commit_s)
            asyncio.get_running_loop().call_later(delay_s, self._commit)

    def _commit(self) -> None:
        self._is_due_soon = False
        flushes: Flushes = []
        try:
            while not self._queue.empty():
                self.world.require_space()
                self._transact(flushes)
        except OSError as error:
            self._fail(InfrastructureError(f"{self._path} cannot be written: {error}"), flushes)
            return
        finish(flushes)

    def _finish(self, flushes: Flushes, error: Exception | None = None) -> None:
        finish(flushes, error)

    async def secure(self) -> None:
        acknowledged = set(self.world.history.acknowledged)
        await super().secure()
        self.world.history.secured |= acknowledged

    def _sync_files(self) -> None:
        if self.world.disk is not None:
            super()._sync_files()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commit()
        self._files.close()


class Handle:
    """As ProcessHandle, of a process in the world. is_unreachable: its machine does not answer the
    launcher, so that it runs on although the supervisor has replaced it.
    """

    waits_for = ""
    why = ""
    is_unreachable = False

    def __init__(self, world: Any, process: Process) -> None:
        self._world = world
        self.process = process
        self.pid = process.pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def placed(self) -> None:
        pass

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        # Without a handler SIGTERM ends a process.
        if self.is_unreachable or not send_signal(self.process, signal.SIGTERM):
            self._die(-signal.SIGTERM)

    def kill(self) -> None:
        self._die(-signal.SIGKILL)

    def ended(self, code: int) -> None:
        """The process has returned, or somebody killed it."""
        if self.process.name == "learner-0" and code == 0:
            self._world.history.learned()
        kill(self.process)
        if not self._code.done():
            self._code.set_result(code)

    def _die(self, code: int) -> None:
        if self.is_unreachable and not self._code.done():
            self._code.set_result(code)
        elif not self.process.is_dead and not self.is_unreachable:
            self.ended(code)


class Launcher:
    """Starts processes of the world in the world."""

    def __init__(self, world: Any) -> None:
        self._world = world

    async def open(self) -> str:
        return "127.0.0.1"

    async def close(self) -> None:
        pass

    async def start(self, spec: ProcessSpec) -> Handle:
        world = self._world
        process = world.new_process(spec.name)
        handle = Handle(world, process)
        world.handles[spec.name] = handle
        task = world.loop.start(process, world.child(spec))
        task.add_done_callback(lambda task: _on_end(handle, task))
        return handle


def _on_end(handle: Handle, task: asyncio.Task[int]) -> None:
    handle.ended(1 if task.cancelled() or task.exception() else task.result())


async def run_child(spec: ProcessSpec, run_dir: Path, log: Any) -> int:
    """As runtime/main.py from the imports on; return the exit code."""
    try:
        await child_main.run_role(spec, run_dir, log)
    except Exception as error:  # noqa: BLE001 - as in runtime/main.py
        if isinstance(root_cause(error), RestartNeeded):
            log.warning("has to be started again: %s", root_cause(error))
            return RESTART_CODE
        log.error("fatal: %s", child_main.describe(error))
        try:
            await child_main.report_error(run_dir, spec.name, error)
        except AsyncRLError as unreachable:
            log.error("the cause could not be reported: %s", unreachable)
        return 1
    return 0
