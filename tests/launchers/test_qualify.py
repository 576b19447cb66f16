"""The list of qualifications, its verdicts and its report."""

from pathlib import Path

import msgspec
import pytest

from async_rl.composition.compose import compose_unchecked
from async_rl.core.machine import Gpu, Gpus, Machine
from benchmarks.qualification import report as reporting
from benchmarks.qualification.catalogue import Limit, Qualification, hardware_page, qualifications
from benchmarks.qualification.report import Report, Result, as_html, make_report, private_words
from benchmarks.qualification.running import judge

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine(cores=(0, 1), num_gpus=0, memory_mb=1000)
ENTRY = Qualification(
    name="rate",
    title="A rate",
    check="learner:step",
    limits=[Limit(number="rate", at_least=2.0, unit="GB/s"), Limit(number="off", at_most=0.5)],
    limit_s=5,
)


def test_limits_and_failures_decide_the_verdict() -> None:
    for numbers, problem, reason in (
        ({"rate": 2.0, "off": 0.5}, "", ""),
        ({"rate": 1.9, "off": 0.1}, "", "not rate >= 2 GB/s"),
        ({"rate": 3.0}, "", "not off <= 0.5"),
        ({}, "exit code 1: RuntimeError: broken", "exit code 1: RuntimeError: broken"),
    ):

        def run(command: list[str], limit_s: float, errors: Path) -> str:
            # The settings of the command come after those of the entry, and win.
            assert (limit_s, command[-1]) == (5, "a=1")
            Path(command[4]).write_bytes(msgspec.json.encode(numbers))  # noqa: B023
            return problem  # noqa: B023

        result = judge(ENTRY, ["a=1"], skip="", run=run)
        assert (result.verdict, result.reason) == ("failed" if reason else "passed", reason)
    assert not ENTRY.limits[0].is_kept({"rate": float("nan")})


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


def reported(reason: str) -> Report:
    facts = {"name": "x", "title": "<b>A & B</b>", "limits": [], "numbers": {}, "seconds": 1.5}
    result = Result(verdict="failed", reason=reason, **facts)
    devices = (Gpu(uuid="u-1", name="H100", memory_mb=81000),)
    gpus = Gpus(driver="580.1", devices=devices)
    return make_report([result], MACHINE, gpus, command="c", created="d")


def test_a_report_has_no_serial_numbers_and_its_page_escapes_what_comes_from_outside() -> None:
    report = reported("<script>alert(1)</script> 'quoted\"")
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
