"""Importing the package, and a dry run, cost little."""

import subprocess
import sys

HEAVY = ("torch", "vllm", "transformers", "ray", "zmq", "hydra", "numpy", "pydantic", "typer")


def loaded_by(code: str, *modules: str) -> str:
    """The given modules that a new interpreter has loaded after this code."""
    check = f"{code}\nimport sys; print(sorted(set({modules!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_loads_no_other_package_and_a_launch_or_dry_run_nothing_heavy() -> None:
    assert loaded_by("import async_rl", *HEAVY) == "[]"
    # A child lowers its priority before it imports TensorBoard.
    assert loaded_by("import async_rl.monitoring.tensorboard_process", "tensorboard") == "[]"
    heavy = ("torch", "vllm", "transformers", "ray", "async_rl.launchers.cli")
    uses = "async_rl.launch, async_rl.open_run, async_rl.Verifier"
    assert loaded_by(f"import async_rl; {uses}", *heavy) == "[]"
    code = """
import contextlib, io, sys
from async_rl.launchers import cli
sys.argv = ["async-rl", "launch", "conf=ppo_code", "--dry-run"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
    cli.main()
assert "learner-0" in shown.getvalue()
"""
    assert loaded_by(code, *heavy[:4], "zmq", "pyarrow", "tensorboard", "tokenizers") == "[]"
