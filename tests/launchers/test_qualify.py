"""The list of qualifications, its verdicts and its report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.core.machine import Gpu, Gpus, Machine
from benchmarks.qualification import learner as learner_check
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
from benchmarks.qualification.learner import _needed_flops
from benchmarks.qualification.models import group_of, model_directory
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
    shows="x",
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


def test_numbers_within_the_limits_pass() -> None:
    result = judged({"rate": 2.0, "off": 0.5})
    assert (result.verdict, result.reason) == ("passed", "")
    assert result.limits == ["rate >= 2 GB/s", "off <= 0.5"]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"rate": 1.9, "off": 0.1}, "not rate >= 2 GB/s"),
        ({"rate": 3.0, "off": 0.6}, "not off <= 0.5"),
        ({"rate": 3.0}, "not off <= 0.5"),
        ({"rate": float("nan"), "off": 0.0}, "not rate >= 2 GB/s"),
    ],
)
def test_a_number_outside_of_its_limit_fails_with_the_limit(
    numbers: dict[str, float], reason: str
) -> None:
    if numbers["rate"] != numbers["rate"]:
        assert not ENTRY.limits[0].is_kept(numbers)
        return
    result = judged(numbers)
    assert (result.verdict, result.reason) == ("failed", reason)


def test_a_check_that_fails_is_a_verdict_with_its_reason() -> None:
    result = judged({}, problem="exit code 1: RuntimeError: broken")
    assert (result.verdict, result.reason) == ("failed", "exit code 1: RuntimeError: broken")
    assert result.numbers == {}


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


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["plain", "hangs"])
def test_a_process_past_its_limit_ends_with_its_children(tmp_path: Path, trap: str) -> None:
    script = f"({trap}sleep 60) & echo $! > {tmp_path}/child; echo begun; wait"
    found = run_limited(["bash", "-c", script], 3.0, tmp_path / "errors")
    assert found == "it ran past its limit of 3 s; begun"
    child = Path("/proc", (tmp_path / "child").read_text().strip())
    deadline_s = time.monotonic() + 20
    # The signal needs a moment on a busy machine. A zombie of another parent has no command line.
    while child.exists() and (child / "cmdline").read_bytes():
        assert time.monotonic() < deadline_s, "the child outlived its command"
        time.sleep(0.01)


def test_gpus_and_machines_that_are_missing_are_the_reason_to_skip() -> None:
    by_name = {entry.name: entry for entry in qualifications()}
    nccl, ray = by_name["broadcast_nccl"], by_name["two_nodes"]
    assert reason_to_skip(nccl, num_gpus=2, num_nodes=1) == ""
    assert "needs 2 GPUs, and this environment can use 1" in reason_to_skip(
        nccl, num_gpus=1, num_nodes=1
    )
    assert "Ray cluster of 2 machines, and 1 answered" in reason_to_skip(
        ray, num_gpus=0, num_nodes=1
    )
    assert reason_to_skip(ray, num_gpus=0, num_nodes=2) == ""


def test_a_package_that_is_missing_is_the_reason_to_skip_and_transformers_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else name)
    reasons = {
        entry.name: reason_to_skip(entry, num_gpus=8, num_nodes=2) for entry in qualifications()
    }
    skipped = {name for name, reason in reasons.items() if reason}
    assert skipped == {"vllm_names", "cuda_graphs", "sleep", "ipc", "colocated"}
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
    names = ("vllm_names", "parity_float32", "run")
    only = [word for name in names for word in ("--only", name)]
    unset = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.qualification", *only, "--out", str(tmp_path / "out")],
        env={name: value for name, value in os.environ.items() if name not in unset}
        | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report)
    verdicts = [result.verdict for result in report.results]
    assert verdicts == ["skipped", "passed", "passed"]
    assert report.machine["engine"] == "transformers"


def test_every_check_is_a_function() -> None:
    package = ROOT / "benchmarks" / "qualification"
    for entry in qualifications():
        module, _, function = entry.check.partition(":")
        assert f"\ndef {function}(" in (package / f"{module}.py").read_text(), entry.check


def test_every_setting_of_the_list_composes() -> None:
    from async_rl.composition.compose import compose_unchecked

    for entry in qualifications():
        compose_unchecked("grpo_code", entry.settings)


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


def test_the_page_escapes_what_comes_from_outside() -> None:
    page = as_html(reported("<script>alert(1)</script> 'quoted\""))
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


def test_a_longer_private_word_is_replaced_before_a_part_of_it() -> None:
    words = list(private_words({"A_KEY": "abcdef", "B_KEY": "abcdefgh"}))
    assert words.index("abcdefgh") < words.index("abcdef")


def test_the_report_has_versions_and_devices() -> None:
    gpus = Gpus(driver="580.1", devices=(Gpu(uuid="u-1", name="H100", memory_mb=81000),))
    report = reported("", gpus=gpus)
    assert report.packages["numpy"]
    assert report.machine["driver"] == "580.1"
    assert report.machine["GPU 0"].startswith("H100, 81000 MB")
    assert "u-1" not in msgspec.json.encode(report).decode()
    again = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert again == report


def test_the_command_lists_runs_and_writes(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["--list"])
    assert listed.exit_code == 0
    assert "two_nodes" in listed.output
    names = ["--only", "ipc", "--only", "broadcast_nccl"]
    done = runner.invoke(app, [*names, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert [result.verdict for result in report.results] == ["skipped", "skipped"]
    assert "skipped" in (tmp_path / "report.html").read_text()


def test_the_page_in_docs_is_written_between_its_markers() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    assert hardware_page(page) == page
    assert all(f"| `{entry.name}` |" in page for entry in qualifications())
    stale = page.replace("| `ipc` | Weights", "| `ipd` | Weights")
    assert hardware_page(stale) == page != stale


def test_the_flops_of_a_step_count_a_shared_prompt_once() -> None:
    # One group: a prompt of 3 tokens, two responses of 2.
    row = np.arange(5, dtype=np.int32)
    response = (row, np.zeros(2, np.float32), np.zeros(2, np.int32))
    group = group_of(0, [response, response], 0)
    packed = pack(
        collate_part(whole([group]), device=torch.device("cpu")), [0, 1], device=torch.device("cpu")
    )
    assert packed.input_ids.shape[1] == 3 + 2 + 2
    # Pairs: 1 + 2 + 3 in the prompt, 4 + 5 in each response.
    pairs = 6 + 2 * 9
    assert _needed_flops([group], 100, 2, 8) == 6 * 100 * 7 + 12 * 2 * 8 * pairs


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about itself
def test_a_healthy_gpu_passes_and_one_at_half_its_rate_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [entry] = [entry for entry in qualifications() if entry.name == "learner_mfu"]
    [limit] = [limit for limit in entry.limits if limit.number == "share_of_roofline"]
    model_directory(tmp_path, [], is_large=False)
    monkeypatch.setattr(learner_check.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB")
    shares = []
    for step_s in (1.0, 2.0):
        numbers = {"step_s": step_s, "product_tflops": 798 / step_s}
        monkeypatch.setattr(learner_check, "step", lambda scratch, settings, n=numbers: n)
        shares.append(learner_check.utilisation(tmp_path, [])["share_of_roofline"])
    assert shares[1] == pytest.approx(shares[0] / 2)
    # An H200 reached 0.75 with a model of 1.7B (docs/performance.md).
    assert limit.is_kept({limit.number: 0.75})
    assert not limit.is_kept({limit.number: 0.75 / 2})


def test_a_skip_starts_nothing() -> None:
    def run(*_: object) -> str:
        raise AssertionError("it was to be skipped")

    result = judge(ENTRY, [], skip="it needs 2 GPUs", run=run)
    assert (result.verdict, result.reason) == ("skipped", "it needs 2 GPUs")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["--only", "speed"])
    assert "no such qualification; use vllm_names" in str(done.exception)
