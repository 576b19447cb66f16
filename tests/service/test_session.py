"""Training and sampling from Python: the real front with a played learner and generators."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from service_support import MODEL, Played, working

import async_rl
from async_rl.composition.compose import compose, write_config
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError, RunFailed
from async_rl.launchers.api import session as session_module
from async_rl.runs.control import leave_mark
from async_rl.service.address import FOLDER, address_of
from async_rl.service.desk import Desk
from async_rl.service.front import build_app
from async_rl.service.store import Store
from async_rl.wire.http import listen, serving


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose("serve")


@contextlib.asynccontextmanager
async def service(run_dir: Path, played: Played, config: RunConfig) -> AsyncIterator[async_rl.Run]:
    """A run whose front is this process."""
    file = run_dir / "config.yaml"
    if not file.exists():
        write_config(config, file)
    address = address_of(run_dir)
    desk = Desk(Store(run_dir / FOLDER, poll_s=0.0), played, MODEL)
    app = build_app(desk, address.api_key)
    async with working(desk), serving(app, listen("127.0.0.1", address.port)):
        yield async_rl.Run(run_dir)


async def test_a_life_of_sampling_training_and_saving(tmp_path: Path, config: RunConfig) -> None:
    played = Played()
    leave_mark(tmp_path)

    def program(run: async_rl.Run) -> None:
        with run.session(rank=8) as session:
            (drawn,), (other,) = session.sample([[1, 2, 3], [4, 5]], max_tokens=4)
            # Played: token i of sequence s is the prompt's sum + i + s.
            assert drawn.tokens.tolist() == [6, 7, 8, 9]
            assert other.prompt.tolist() == [4, 5]
            assert drawn.versions.tolist() == [0] * 4
            row = drawn.datum(0.5)
            assert row.tokens.tolist() == [1, 2, 3, 6, 7, 8]
            assert row.inputs["target_tokens"].tolist() == [2, 3, 6, 7, 8, 9]
            assert row.inputs["advantages"].tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5]
            assert row.inputs["logprobs"].tolist() == [0, 0, *drawn.logprobs.tolist()]
            logprobs, metrics = session.forward_backward([row, other.datum(-1)], "ppo")
            assert [len(values) for values in logprobs] == [6, 5]
            assert metrics["age_max:max"] == 0, "the origin of its tokens was checked"
            inputs = {**row.inputs, "target_tokens": row.inputs["target_tokens"] + 1}
            lie = async_rl.Datum(tokens=row.tokens, inputs=inputs, target_spans=row.target_spans)
            with pytest.raises(DataError, match=r"datum 0: target_tokens\[0\] is 3, and 2 at 1 of"):
                session.forward_backward([lie], "ppo")
            assert session.step(1e-3)["chain"] > 0
            (again,) = session.sample([[1, 2, 3]], num_samples=2, max_tokens=2, temperature=0.5)
            assert [it.versions.tolist() for it in again] == [[1, 1], [1, 1]]
            with pytest.raises(DataError, match="token 100 is not below"):
                session.sample([[100]])
            saved = session.save("one")
            session.sample([[1]])
        with run.session(checkpoint=saved) as resumed:
            assert resumed.step(1e-3, beta1=0.5)["chain"] > 0
            assert resumed.run_id != session.run_id

    async with service(tmp_path, played, config) as run:
        await asyncio.to_thread(program, run)
    kinds = [operation for _, _, operation in played.executed]
    assert kinds == [
        "create_model",
        "save_weights_for_sampler",
        "forward_backward",
        "optim_step",
        "save_weights_for_sampler",
        "save_weights",
        "load_weights",
        "optim_step",
    ], "the weights did not change after the second sample"
    assert played.sampled[2].temperature == 0.5


async def test_a_call_to_a_service_that_ended_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    monkeypatch.setattr(session_module, "TRIES", 0)
    played = Played()
    async with service(tmp_path, played, config) as run:
        leave_mark(tmp_path, os.getpid())
        session = await asyncio.to_thread(run.session, rank=4)
        # It was accepted before the end.
        played.gate = asyncio.Event()
        played.has_begun.clear()
        calling = asyncio.create_task(asyncio.to_thread(session.step, 1e-3))
        await played.has_begun.wait()
        (tmp_path / "launched.json").unlink()
    with pytest.raises(RunFailed, match=f"the service {tmp_path.name} is not running"):
        await calling
    played.gate = None
    async with service(tmp_path, played, config):
        await asyncio.to_thread(session.step, 1e-3)
        await asyncio.to_thread(session.close)
    assert played.steps == [1]


def test_a_run_that_is_no_service_has_no_sessions(tmp_path: Path) -> None:
    write_config(compose("grpo_code"), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r'is not a service; start one with launch\("serve"\)'):
        async_rl.Run(tmp_path).session()
    assert not (tmp_path / FOLDER).exists()
