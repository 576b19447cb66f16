"""Facts about the script `async-rl`."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import sys
sys.argv = ["async-rl", *{arguments}]
from async_rl.launchers.main import main
try:
    main()
except SystemExit as end:
    commands = [name for name in sys.modules if name.startswith("async_rl.launchers.commands.")]
    print(end.code, sorted(name.rpartition(".")[2] for name in commands))
"""


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = RUN.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_a_command_starts_without_the_modules_of_the_others() -> None:
    done = ended("verifier", "num_steps=3")
    assert done.stdout.splitlines()[-1] == "2 ['options', 'verifier']"
    assert done.stderr.startswith("error: num_steps=3: without a run only sandbox.*")
    assert "Usage: async-rl verifier" in " ".join(ended("verifier", "--help").stdout.split())


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["verifie"], 2)])
def test_all_commands_are_known_where_none_is_named(words: list[str], code: int) -> None:
    done = ended(*words)
    assert done.stdout.splitlines()[-1].startswith(f"{code} ['data', 'doctor'")


def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    interrupt = """
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
import sys
sys.meta_path.insert(0, Interrupt())
"""
    for command in ("status", "verifier"):
        script = interrupt + RUN.format(arguments=[command])
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("130 []\n", "")
