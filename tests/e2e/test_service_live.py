"""A training service with vLLM and the unmodified client of the Tinker API: a program whose service
loses every process by SIGKILL gets the same weights, bit for bit, as one that is left alone.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_support import LiveRun, notebook, outputs

from async_rl.service.address import address_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Service:
    """The service after its end. left_alone, killed: what the program printed that nothing
    disturbed, and the one whose service lost every process; shown: the outputs of the notebook,
    which ran afterwards.
    """

    run: LiveRun
    left_alone: dict[str, Any]
    killed: dict[str, Any]
    shown: list[str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with contextlib.ExitStack() as stack:
        run = LiveRun(folder / "runs", "conf=serve", "generation.vllm.kv_cache_mb=64", name=NAME)
        lives = [run]
        stack.callback(run.end)
        run.until(lambda: run.member("gateway-0") != {}, "the front")
        left_alone = play(run.run_dir, {})

        def lose_everything() -> None:
            run.kill_all()
            lives.append(LiveRun(folder / "runs", name=NAME, resumes=True))
            stack.callback(lives[-1].end)

        kills = {
            "learner": lambda: run.kill("learner-0"),
            "gateway": lambda: run.kill("gateway-0"),
            "everything": lose_everything,
            "generator": lambda: lives[-1].kill("generator-0"),
        }
        killed = play(run.run_dir, kills)
        found, cells = notebook("session.ipynb")
        launches = re.sub(
            r"async_rl\.launch\(.*\)", f"async_rl.open_run('runs/{NAME}')", cells[0].source
        )
        assert "open_run" in launches
        cells[0].source = launches
        yield Service(run, left_alone, killed, outputs(found, folder))


NAME = "session"
"""Of the run in the notebook."""


def play(run_dir: Path, at: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Run the program to its end, with a deed at some of its pauses; return what it printed."""
    address = address_of(run_dir)
    script = Path(__file__).with_name("service_program.py")
    command = [sys.executable, str(script), f"http://127.0.0.1:{address.port}", address.api_key]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
                at.get(line.strip(), lambda: None)()
                process.stdin.write("\n")
                process.stdin.flush()
        finally:
            process.kill()
    raise AssertionError(f"the program ended with {process.returncode}")


def state_of(run: LiveRun, path: str) -> bytes:
    name, kind, checkpoint = path.removeprefix("tinker://").split("/")
    folder = run.run_dir / "service" / "runs" / name.replace(":", ".") / kind
    (saved,) = folder.glob(f"{checkpoint}~*")
    return (saved / "state.safetensors").read_bytes()


def test_a_service_that_loses_every_process_trains_the_same_bits(service: Service) -> None:
    killed, left_alone = service.killed, service.left_alone
    assert killed["losses"] == left_alone["losses"]
    assert killed["scored"] == left_alone["scored"]
    assert killed["drawn"] == left_alone["drawn"] == 8
    assert state_of(service.run, killed["state"]) == state_of(service.run, left_alone["state"])
    assert killed["state"] != left_alone["state"]


def test_a_loop_of_calls_learns_and_so_does_the_same_loop_with_the_tinker_client(
    service: Service,
) -> None:
    shown = service.shown
    own, clients = (
        [float(reward) for reward in re.findall(r"mean reward (.+)", shown[cell])]
        for cell in (2, 4)
    )
    assert max(own[0], clients[0]) < 0.4
    assert own[-1] > 0.7
    # Of the client's 48 samples of the first step none to two are short, so its curve may rise
    # late: 0.2 is far above chance.
    assert max(clients) > 0.2
    assert shown[-1].splitlines()[-1] == "stopped"
