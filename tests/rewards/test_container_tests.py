import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container_support import IMAGE, PYTEST, PYTHON, Engine
from rewards_support import LIMITS, run_config, verdicts_of, verifier_process
from tables import table

from async_rl.config.base import replace
from async_rl.core.errors import InfrastructureError, Unsupported
from async_rl.core.types import CodeProblem, ContainerTest, StdinTest
from async_rl.rewards.verifier.container_run import failure_of_report
from async_rl.rewards.verifier.containers import Containers

SQUARE = {"prints": StdinTest(input="3\n", output="9")}
TESTS = table(__file__, "tests")
REPORT = {
    "command": PYTEST,
    "files": {"/work/test_f.py": TESTS},
    "report": "/work/report.xml",
    "passing": ["test_f.test_one", "test_f.test_two"],
    "failing": ["test_f.test_canary"],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("rootfs") / "root")
    yield made
    made.close()


def test_output_status_or_report_decides(engine: Engine) -> None:
    programs: list[tuple[str, Any, str]] = [
        ("print(int(input()) ** 2)", SQUARE, "pass"),
        ("print(int(input()) ** 3)", SQUARE, "wrong_answer"),
        ("raise SystemExit(3)", SQUARE, "runtime_error"),
        ("pass", {}, "pass"),
        ("raise SystemExit(3)", {}, "wrong_answer"),
        ("def f(x): return x * x", REPORT, "pass"),
        ("def f(x): return x", REPORT, "wrong_answer"),
        ("", {"command": ["no-such-command"]}, "test_error"),
    ]
    found = engine.results(*(program[:2] for program in programs))
    assert [each.verdict for each in found] == [right for *_, right in programs]


HOSTILE_REPORTS = table(__file__, "hostile_reports")


def test_a_forged_report_does_not_pass(engine: Engine) -> None:
    programs = [(code, REPORT) for code in HOSTILE_REPORTS.values()]
    found = dict(zip(HOSTILE_REPORTS, engine.results(*programs), strict=True))
    assert {name: each.message for name, each in found.items() if each.verdict == "pass"} == {}
    assert found["expands entities"].message.endswith("it has a document type")
    assert found["writes a huge report"].message == "the report has more than 4 MB"


def test_a_container_sees_and_changes_nothing_of_the_host(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "t")
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:1")
    (tmp_path / "host").touch()
    code = table(__file__, "probe").replace("PORT", "22")
    code = code.replace("HOST", repr(str(tmp_path / "host")))
    test = {"files": {"/work/given": "x"}, "prints": StdinTest(input="", output="-")}
    seen = json.loads(engine.result(code, **test).message)
    assert "WORKED" not in seen.pop("fails").values()
    assert int(seen.pop("capabilities").replace("\n", ""), 16) == 0
    assert set(seen.pop("names")) <= {"PATH", "TERM", "HOSTNAME", "HOME", "container", "LC_CTYPE"}
    assert seen.pop("descriptors") == 5  # three streams, the socket, and the listing itself
    assert seen == {
        "privileges": "1", "filter": "2", "processes": 1, "networks": ["lo"], "host": False
    }  # fmt: skip


BOMBS = table(__file__, "bombs")


def test_limits_hold_for_all_processes_of_a_container(engine: Engine) -> None:
    programs = [(bomb["code"], SQUARE | bomb["limits"]) for bomb in BOMBS.values()]
    started = time.monotonic()
    found = dict(zip(BOMBS, engine.results(*programs), strict=True))
    assert {name: str(each.verdict) for name, each in found.items()} == {
        name: bomb["verdict"] for name, bomb in BOMBS.items()
    }, found
    assert time.monotonic() - started < 60
    assert engine.listed() == []


def test_a_cancelled_program_leaves_no_container(engine: Engine) -> None:
    async def cancel(after_s: float) -> None:
        task = asyncio.create_task(engine.judge("import time; time.sleep(100)"))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*engine.containers.removing)

    # Before the container is there, and while its command runs.
    for after_s in (0.1, 1.5):
        engine.run(cancel(after_s))
        assert engine.listed() == []


def test_a_killed_verifier_leaves_no_container(engine: Engine, tmp_path: Path) -> None:
    script = tmp_path / "verifier.py"
    script.write_text(table(__file__, "verifier"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script), str(engine.root), *engine.words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        label = process.stdout.readline().strip()
        _wait_for(lambda: engine.listed(label) != [])
        os.killpg(process.pid, signal.SIGKILL)
    _wait_for(lambda: engine.listed(label) == [])
    _wait_for(lambda: list(tmp_path.glob("async-rl-container-*")) == [])


def _wait_for(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.proves("sandbox.container_engine", "sandbox.rootfs")
def test_an_engine_or_an_image_that_is_missing_is_named(engine: Engine, tmp_path: Path) -> None:
    async def require(words: list[str], rootfs: dict[str, str]) -> None:
        containers = Containers(words, rootfs, 1)
        try:
            await containers.require(IMAGE)
        finally:
            await containers.close()

    missing = str(tmp_path / "nothing")
    for words, rootfs, said in (
        (["no-such-engine"], {}, "no-such-engine, which does not work here: No such file"),
        (engine.words, {}, "has no image python"),
        (engine.words, {IMAGE: missing}, f"sandbox.rootfs.python={missing} is not a directory"),
    ):
        with pytest.raises(Unsupported, match=said):
            engine.run(require(words, rootfs))
    engine.run(require(engine.words, {IMAGE: str(engine.root)}))


def test_a_container_that_does_not_start_is_never_a_verdict(engine: Engine) -> None:
    async def judge() -> None:
        broken = Containers([*engine.words, "--root", "/dev/null"], {IMAGE: str(engine.root)}, 1)
        try:
            broken.controllers = []
            engine_of, engine.containers = engine.containers, broken
            await engine.judge("pass")
        finally:
            engine.containers = engine_of
            await broken.close()

    with pytest.raises(InfrastructureError, match="a container of python did not start: "):
        engine.run(judge())


def test_a_run_and_the_server_reach_containers(engine: Engine) -> None:
    sandbox = replace(LIMITS, container_engine=engine.words, rootfs={IMAGE: str(engine.root)})
    config = replace(run_config(), sandbox=sandbox)
    problem = CodeProblem(
        tests=[
            ContainerTest(image=IMAGE, command=["/usr/bin/sh", "/work/a.sh"], program="/work/a.sh",
                          prints=StdinTest(input="7", output="7.0")),
            ContainerTest(image=IMAGE, command=PYTHON),
        ],
        language="shell",
    )  # fmt: skip
    unknown = CodeProblem(tests=[ContainerTest(image="no-such", command=PYTHON)])

    async def ask() -> tuple[list[str], str]:
        async with verifier_process(config) as client:
            judged = await client.verify(problem, "cat; exit 0")
            with pytest.raises(InfrastructureError) as caught:
                await client.verify(unknown, "")
            return [*map(str, verdicts_of(judged))], str(caught.value)

    found, reason = asyncio.run(ask())
    # 7 is 7.0 by the rules of standard output; the second command runs a file that is not there.
    assert found == ["pass", "wrong_answer"]
    assert "has no image no-such on this machine" in reason


@pytest.mark.parametrize(
    ("report", "passing", "failing", "said"), table(__file__, "a_report_says_which_tests")
)
def test_a_report_says_which_tests_passed(
    report: str, passing: list[str], failing: list[str], said: str
) -> None:
    found = failure_of_report(report.encode(), passing, failing)
    assert said in found
    assert bool(found) == bool(said)
