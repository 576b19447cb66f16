"""The real client, unmodified, against the real front with a played learner and generators."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from service_support import KEY, MODEL, Played, folder, working

from async_rl.service.desk import Desk
from async_rl.service.front import build_app
from async_rl.service.store import Store
from async_rl.wire.http import listen, serving, url_of

pytest.importorskip("tinker")
PROGRAMS = Path(__file__).with_name("tinker_program.py")


@dataclasses.dataclass
class Used:
    """A service after the programs. got: what each of them printed."""

    directory: Path
    played: Played
    got: dict[str, Any]

    def executed(self, program: str) -> list[tuple[int, str]]:
        """Numbers and kinds of the requests of its run."""
        run = self.got[program]["model_id"]
        return [entry[1:] for entry in self.played.executed if entry[0] == run]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    directory, played = tmp_path_factory.mktemp("service"), Played()
    return Used(directory, played, asyncio.run(use(directory, played)))


async def use(directory: Path, played: Played) -> Any:
    """Return what the programs printed."""
    listener = listen("127.0.0.1", 0)
    desk = Desk(Store(directory), played, MODEL)
    async with working(desk) as work, serving(build_app(desk, KEY), listener):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAMS), url_of(listener), KEY),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        talking = asyncio.create_task(process.communicate())
        await asyncio.wait((talking, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            process.kill()
            work.result()
        printed, errors = await talking
    assert process.returncode == 0, errors.decode()
    return json.loads(printed.splitlines()[-1])


def test_a_life_of_training_sampling_saving_and_resuming(used: Used) -> None:
    got, played = used.got["life"], used.played
    run = got["model_id"]
    assert used.executed("life") == [
        (0, "create_model"),
        (1, "forward_backward"),
        (2, "optim_step"),
        (3, "save_weights_for_sampler"),
        (4, "save_weights"),
        (5, "save_weights_for_sampler"),
    ]
    assert got["metrics"]["loss:sum"] > 0
    assert [len(row) for row in got["logprobs"]] == [3, 3]
    assert got["step"]["chain"] > 0
    # Played: token i of sequence s is the prompt's sum + i + s.
    assert got["tokens"] == [[6, 7, 8, 9], [7, 8, 9, 10]]
    assert got["sampled"][1] == pytest.approx([-1, -1 - 1 / 7, -1 - 2 / 7, -1 - 3 / 7])
    assert got["stops"] == ["stop", "length"]
    assert got["top"] == [[[1, -0.5]] * 3] * 4
    assert len(set(got["ids"])) == 2
    assert got["saved"] == f"tinker://{run}/weights/one"
    assert got["named"] == f"tinker://{run}/sampler_weights/two"
    session = run.partition(":")[0]
    assert [got["again"], got["weights_only"]] == [f"{session}:train:1", f"{session}:train:2"]
    assert got["rank"] == 8
    assert got["tokenizer"] == MODEL.tokenizer
    assert got["base_model"] == MODEL.name
    assert got["prompt"] == [None, -1.0, -2.0]
    assert got["scored"] == [None, *[[[1, -1.5]] * 2] * 2]
    ephemeral, base = played.sampled[0], played.sampled[1]
    folders = used.directory / "runs" / folder(run)
    assert ephemeral.adapter == str(folders / "sampler_weights" / "~3")
    assert (ephemeral.version, ephemeral.stop_ids, base.stop_ids) == (1, (7,), None)
    assert (base.adapter, base.policy, base.version) == ("", "", 0)


def test_custom_losses_are_computed_by_the_client(used: Used) -> None:
    assert used.executed("custom") == [
        (0, "create_model"),
        (1, "forward"),
        (2, "forward_backward"),
        (3, "optim_step"),
    ]
    assert used.got["custom"]["metrics"]["squares:sum"] > 0


def test_the_parts_of_a_batch_are_executed_in_order(used: Used) -> None:
    assert used.got["chunks"]["rows"] == 10_500
    kinds = ("create_model", "forward_backward", "forward_backward", "optim_step")
    assert used.executed("chunks") == list(enumerate(kinds))


def test_an_inflight_sampler_follows_its_run_and_a_batch_proves_its_origin(used: Used) -> None:
    got = used.got["inflight"]
    assert [version for _, _, version in used.played.loaded] == [0, 3]
    # Played: the first half of the tokens has the first version, the rest the newest one.
    ages = {name: value for name, value in got["metrics"].items() if name.startswith("age")}
    assert ages == {"age_mean:mean": 1.5, "age_max:max": 3.0}
    assert f"logprobs[5] is -9.0, and {-3 / 7:.8f}"[:30] in got["refused"]
    assert got["id"] in got["refused"]


def test_refusals_reach_the_user_with_their_remedy(used: Used) -> None:
    for name, text in {
        "model": "use 'local/tiny'",
        "rank": "rank=64 is not trained here: model.lora.rank=32",
        "dimuon": "use adamw",
        "loss": "use ppo, cispo",
        "path": "was never saved here",
    }.items():
        assert text in used.got["refused"][name], name
