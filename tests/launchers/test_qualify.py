"""The list of qualifications, its verdicts and its report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from async_rl.composition.compose import compose_unchecked
from async_rl.core.machine import Gpu, Gpus, Machine
from benchmarks.qualification import report as reporting
from benchmarks.qualification.__main__ import app
from benchmarks.qualification.catalogue import (
    Limit,
    Qualification,
    engine_settings,
    hardware_page,
    qualifications,
    reason_to_skip,
)
from benchmarks.qualification.report import (
    Report,
    Result,
    as_html,
    make_report,
    private_words,
)
from benchmarks.qualification.running import judge, run_limited

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine(cores=(0, 1), num_gpus=0, memory_mb=1000)
ENTRY = Qualification(
    name="rate",
    title="A rate",
    check="learner:step",
    limits=[Limit(number="rate", at_least=2.0, unit="GB/s"), Limit(number="off", at_most=0.5)],
    limit_s=5,
)


def judged(numbers: dict[str, float], *, problem: str = "") -> Result:
    def run(command: list[str], limit_s: float, errors: Path) -> str:
        assert limit_s == 5
        # The settings of the command come after those of the entry, and win.
        assert command[-1] == "a=1"
        Path(command[4]).write_bytes(msgspec.json.encode(numbers))
        return problem

    return judge(ENTRY, ["a=1"], skip="", run=run)


@pytest.mark.parametrize(
    ("numbers", "problem", "verdict", "reason"),
    [
        ({"rate": 2.0, "off": 0.5}, "", "passed", ""),
        ({"rate": 1.9, "off": 0.1}, "", "failed", "not rate >= 2 GB/s"),
        ({"rate": 3.0, "off": 0.6}, "", "failed", "not off <= 0.5"),
        ({"rate": 3.0}, "", "failed", "not off <= 0.5"),
        ({}, "exit code 1: RuntimeError: broken", "failed", "exit code 1: RuntimeError: broken"),
    ],
)
def test_limits_and_failures_decide_the_verdict(
    numbers: dict[str, float], problem: str, verdict: str, reason: str
) -> None:
    result = judged(numbers, problem=problem)
    assert (result.verdict, result.reason) == (verdict, reason)
    assert result.limits == ["rate >= 2 GB/s", "off <= 0.5"]
    assert not ENTRY.limits[0].is_kept({"rate": float("nan")})


def test_a_skip_starts_nothing() -> None:
    result = judge(ENTRY, [], skip="it needs 2 GPUs", run=lambda *_: pytest.fail("started"))
    assert (result.verdict, result.reason) == ("skipped", "it needs 2 GPUs")


def test_a_process_that_fails_reports_its_last_lines_and_has_the_searched_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a/copy/of/the/project")
    engine = "(EngineCore pid=7) ERROR [core.py:9] ImportError: of the engine"
    script = f"import sys; print({engine!r}, *range(9), sys.path, sep='\\n'); sys.exit('the cause')"
    found = run_limited([sys.executable, "-c", script], 20, tmp_path / "errors")
    assert found.startswith("exit code 1: ImportError: of the engine | 5")
    assert "the cause" in found
    assert "/a/copy/of/the/project" in found


def test_a_process_past_its_limit_ends_with_its_children(tmp_path: Path) -> None:
    script = f"(trap '' TERM; sleep 60) & echo $! > {tmp_path}/child; echo begun; wait"
    found = run_limited(["bash", "-c", script], 1.0, tmp_path / "errors")
    assert found == "it ran past its limit of 1 s; begun"
    child = Path("/proc", (tmp_path / "child").read_text().strip())
    deadline_s = time.monotonic() + 20
    # The signal needs a moment on a busy machine. A zombie of another parent has no command line.
    while child.exists() and (child / "cmdline").read_bytes():
        assert time.monotonic() < deadline_s, "the child outlived its command"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "num_gpus", "num_nodes", "reason"),
    [
        ("broadcast_nccl", 2, 1, ""),
        ("broadcast_nccl", 1, 1, "needs 2 GPUs, and this environment can use 1"),
        ("two_nodes", 0, 1, "Ray cluster of 2 machines, and 1 answered"),
        ("two_nodes", 0, 2, ""),
    ],
)
def test_gpus_and_machines_that_are_missing_are_the_reason_to_skip(
    name: str, num_gpus: int, num_nodes: int, reason: str
) -> None:
    [entry] = [entry for entry in qualifications() if entry.name == name]
    found = reason_to_skip(entry, num_gpus=num_gpus, num_nodes=num_nodes)
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_package_that_is_missing_is_the_reason_to_skip_and_transformers_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else name)
    reasons = {
        entry.name: reason_to_skip(entry, num_gpus=8, num_nodes=2) for entry in qualifications()
    }
    skipped = {name for name, reason in reasons.items() if reason}
    assert skipped == {"vllm_names", "cuda_graphs", "sleep", "colocated"}
    assert reasons["sleep"].startswith("it needs the package vllm, which is not installed; pip")
    assert engine_settings() == ["generation.engine=hf"]
    assert reported("").machine["engine"] == "transformers"
    monkeypatch.undo()
    assert engine_settings() == []


_BARE = """
import importlib.machinery, socket
find, connect = importlib.machinery.PathFinder.find_spec, socket.socket.connect
def bare(name, *rest):
    return None if name.partition(".")[0] in ("vllm", "ray") else find(name, *rest)
def local(self, address):
    if self.family != socket.AF_UNIX and not address[0].startswith("127."):
        raise OSError(f"no network: {address}")
    return connect(self, address)
def resolved(host, *rest, **others):
    if host not in (None, "localhost", "127.0.0.1"):
        raise socket.gaierror(f"no network: {host}")
    return resolve(host, *rest, **others)
resolve = socket.getaddrinfo
importlib.machinery.PathFinder.find_spec = staticmethod(bare)
socket.socket.connect, socket.getaddrinfo = local, resolved
"""
"""Hides vLLM and Ray from a process, and lets it reach this machine alone."""


@pytest.mark.slow
def test_a_machine_without_vllm_and_network_is_measured_with_the_engine_of_transformers(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BARE)
    names = ("vllm_names", "parity_float32")
    only = [word for name in names for word in ("--only", name)]
    unset = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.qualification", *only, "--out", str(tmp_path / "out")],
        env={name: value for name, value in os.environ.items() if name not in unset}
        | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report)
    verdicts = [result.verdict for result in report.results]
    assert verdicts == ["skipped", "passed"]
    assert report.machine["engine"] == "transformers"


def test_every_entry_is_a_function_with_settings_that_compose_and_stands_in_the_docs() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    assert hardware_page(page) == page
    stale = page.replace("| `sleep` | Sleep", "| `slept` | Sleep")
    assert hardware_page(stale) == page != stale
    for entry in qualifications():
        module, _, function = entry.check.partition(":")
        source = ROOT / "benchmarks" / "qualification" / f"{module}.py"
        assert f"\ndef {function}(" in source.read_text(), entry.check
        compose_unchecked("grpo_code", entry.settings)
        assert f"| `{entry.name}` |" in page


def reported(reason: str, *, gpus: Gpus | None = None) -> Report:
    result = Result(
        name="x",
        title="<b>A & B</b>",
        verdict="failed",
        reason=reason,
        limits=["rate >= 2"],
        numbers={"rate": 1.0},
        seconds=1.5,
    )
    return make_report(
        [result], MACHINE, gpus or Gpus(problem="no driver"), command="c", created="d"
    )


def test_a_report_has_versions_and_devices_and_its_page_escapes_what_comes_from_outside() -> None:
    gpus = Gpus(driver="580.1", devices=(Gpu(uuid="u-1", name="H100", memory_mb=81000),))
    report = reported("<script>alert(1)</script> 'quoted\"", gpus=gpus)
    assert report.packages["numpy"]
    assert report.machine["driver"] == "580.1"
    assert report.machine["GPU 0"].startswith("H100, 81000 MB")
    assert "u-1" not in msgspec.json.encode(report).decode()
    page = as_html(report)
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;A &amp; B&lt;/b&gt;" in page
    assert "http" not in page, "nothing is loaded from elsewhere"


def test_names_paths_and_secrets_of_this_machine_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.setenv("SHORT_KEY", "1")
    monkeypatch.setattr(reporting.socket, "gethostname", lambda: "my-host-7")
    monkeypatch.setattr(reporting.getpass, "getuser", lambda: "somebody")
    report = reported(f"my-host-7: {Path.home()}/run of somebody with hf_secret_value, 1 GPU")
    assert report.results[0].reason == "<host>: <home>/run of <user> with <HF_TOKEN>, 1 GPU"
    assert "hf_secret_value" not in as_html(report)
    words = list(private_words({"A_KEY": "abcdef", "B_KEY": "abcdefgh"}))
    assert words.index("abcdefgh") < words.index("abcdef"), "or a part of it would stay"


def test_the_command_lists_runs_and_writes(tmp_path: Path) -> None:
    runner = CliRunner()
    assert "two_nodes" in runner.invoke(app, ["--list"]).output
    unknown = runner.invoke(app, ["--only", "speed"])
    assert "no such qualification; use vllm_names" in str(unknown.exception)
    words = ["--only", "sleep", "--only", "broadcast_nccl", "--out", str(tmp_path)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert [result.verdict for result in report.results] == ["skipped", "skipped"]
    assert "skipped" in (tmp_path / "report.html").read_text()
