"""The real client, unmodified, against the real front with a played learner and generators. What
its user sees is checked by tinker_program.py itself.
"""

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
    """A service after the programs. runs: the training run of each program."""

    directory: Path
    played: Played
    runs: dict[str, str]

    def executed(self, program: str) -> list[tuple[int, str]]:
        """Numbers and kinds of the requests of its run."""
        return [entry[1:] for entry in self.played.executed if entry[0] == self.runs[program]]


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


def test_the_requests_of_a_client_are_executed_in_the_order_of_its_calls(used: Used) -> None:
    kinds = {
        "life": (
            *("forward_backward", "optim_step"),
            *("save_weights_for_sampler", "save_weights", "save_weights_for_sampler"),
        ),
        "custom": ("forward", "forward_backward", "optim_step"),
        "chunks": ("forward_backward", "forward_backward", "optim_step"),
    }
    for program, expected in kinds.items():
        assert used.executed(program) == list(enumerate(("create_model", *expected)))
    assert used.executed("refusals")[-1][1] == "forward_backward"


def test_samples_are_drawn_with_the_weights_that_their_client_names(used: Used) -> None:
    ephemeral, base = used.played.sampled[0], used.played.sampled[1]
    folders = used.directory / "runs" / folder(used.runs["life"])
    assert ephemeral.adapter == str(folders / "sampler_weights" / "~3")
    assert (ephemeral.version, ephemeral.stop_ids, base.stop_ids) == (1, (7,), None)
    assert (base.adapter, base.policy, base.version) == ("", "", 0)
    assert [version for _, _, version in used.played.loaded] == [0, 3], "those in flight"
