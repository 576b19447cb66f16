"""Without the packages of an extra, everything else works, and the rest names the extra."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from async_rl.core.extras import EXTRA_OF
from async_rl.launchers import cli

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({packages!r}))  # an import of None fails like a missing package
from async_rl.launchers import cli
sys.argv = ["async-rl", *{words!r}]
cli.main()
"""
TRAINING = sorted(package for package, extra in EXTRA_OF.items() if extra != "verifier")


def without(packages: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `async-rl` where these packages are not installed."""
    code = BLOCKED.format(packages=packages, words=words)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_programs_are_judged_without_any_package_of_training(tmp_path: Path) -> None:
    row = {"prompt": "", "completion": "def f(a): return a", "test_list": ["assert f(1) == 1"]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    done = without(TRAINING, "verify", str(file))
    assert done.returncode == 0, done.stderr
    assert "pass" in done.stdout


def test_help_needs_no_extra_and_a_verifier_names_its_own() -> None:
    help_ = without(sorted(EXTRA_OF), "verifier", "--help")
    assert help_.returncode == 0, help_.stderr
    done = without(["uvicorn"], "verifier")
    assert done.returncode == 2
    needed = "async-rl verifier needs the package uvicorn, which is not installed; pip install"
    assert done.stderr.startswith(f"error: {needed} 'async-rl[verifier]'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("packages", "words", "message"), table(__file__, "missing"))
def test_the_extra_of_a_missing_package_is_named_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    packages: list[str],
    words: list[str],
    message: str,
) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["async-rl", "launch", "conf=grpo_code", "--dry-run", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == (2 if message else 0)
    assert message in capsys.readouterr().err
