"""Facts about launcher=slurm that need no Slurm: the script, the steps' commands, and what srun's
signals and output mean.
"""

import asyncio
import signal
import stat
import sys
from pathlib import Path

import pytest
import yaml
from composing import compose
from tables import table

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.launchers import supervise_run
from async_rl.launchers.backends.slurm import SlurmLauncher, job_script
from async_rl.launchers.preflight import checks
from async_rl.planning.shape import shape_from_hf
from async_rl.planning.topology import ProcessSpec, processes

MODELS = Path(__file__).parents[1] / "planning" / "models.yaml"
EIGHT_BILLION = yaml.safe_load(MODELS.read_text())["QWEN3_8B"]
ALWAYS = "--job-name=mine --output=/runs/mine/logs/slurm.out --open-mode=append"
MACHINE = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)
FAKE_SRUN = """#!/bin/bash
echo "$@" > "$SRUN_SAID"
while [[ $1 != */python* ]]; do shift; done
trap 'kill -USR1 $task' USR1; trap 'kill -KILL $task' TERM
printf '%s' "$PRETENDED" > "$SRUN_SAID.py"
"$1" "$SRUN_SAID.py" & task=$!
wait $task; while kill -0 $task 2>/dev/null; do wait $task; done
wait $task; exit $?
"""


def settings(*overrides: str) -> RunConfig:
    return compose("ppo_code", ["launcher=slurm", *overrides])


def options(script: str) -> str:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return " ".join(line.removeprefix("#SBATCH ") for line in lines)


def spec(config: RunConfig, name: str) -> ProcessSpec:
    return next(spec for spec in processes(config, MACHINE) if spec.name == name)


def test_the_script_asks_for_what_the_settings_say_and_becomes_the_supervisor() -> None:
    given = ["launcher.nodes=3", "launcher.gpus_per_node=8", "timeouts.start_s=450"]
    given.append('launcher.extra=["--cpus-per-task=16","--time=02:00:00"]')
    script = job_script(settings(*given), Path("/runs/mine"))
    assert options(script) == (
        f"{ALWAYS} --nodes=3 --ntasks-per-node=1 --gpus-per-node=8 --time=24:00:00"
        " --signal=B:TERM@300 --no-kill --cpus-per-task=16 --time=02:00:00"
    )
    assert script.startswith("#!/bin/bash\n")
    assert script.splitlines()[-1].startswith("exec ")
    assert script.endswith(" -m async_rl.launchers.supervise_run /runs/mine\n")
    # What is left open is left to Slurm, and nodes are whole.
    assert options(job_script(settings(), Path("/runs/mine"))) == (
        f"{ALWAYS} --nodes=1 --ntasks-per-node=1 --exclusive --time=24:00:00 --signal=B:TERM@120"
        " --no-kill"
    )


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def launcher_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """A launcher whose srun runs a pretended process: PRETENDED is its code."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "logs").mkdir()
    program(tmp_path / "bin" / "srun", FAKE_SRUN)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("SRUN_SAID", str(tmp_path / "said"))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    return SlurmLauncher


async def life(launcher: SlurmLauncher, config: RunConfig, name: str, act: str) -> tuple[int, int]:
    """(process id, exit code) of one step; act: the handle's method that is called once it has a
    place.
    """
    await launcher.open()
    process = await launcher.start(spec(config, name))
    await process.placed()
    if act:
        {"terminate": process.terminate, "kill": process.kill}[act]()
    async with asyncio.timeout(20):
        return process.pid, await process.wait()


HANDLES = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(7)); "


@pytest.mark.parametrize(
    ("code", "act", "expected"),
    [
        ("raise SystemExit(3)", "", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "", -signal.SIGKILL),
        ("signal.pause()", "kill", -signal.SIGKILL),
        ("signal.pause()", "terminate", 7),  # by the signal that srun passes on
    ],
)
def test_the_end_of_a_step_is_the_end_of_its_task(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher_of: type[SlurmLauncher],
    code: str,
    act: str,
    expected: int,
) -> None:
    monkeypatch.setenv("PRETENDED", f"{HANDLES}print(os.getpid(), flush=True); {code}")
    config = settings()
    pid, ended = asyncio.run(life(launcher_of(tmp_path, config), config, "verifier-0", act))
    assert pid > 0
    assert ended == expected
    assert str(pid) not in (tmp_path / "logs" / "verifier-0.out").read_text().splitlines()


@pytest.mark.parametrize(("overrides", "name", "asks"), table(__file__, "steps"))
def test_a_step_takes_what_its_role_takes(
    tmp_path: Path, overrides: list[str], name: str, asks: str
) -> None:
    config = settings(*overrides)
    said = set(SlurmLauncher(tmp_path, config).srun_command(spec(config, name)))
    assert {*asks.split(), "--exact", "--nodes=1", "--ntasks=1"} <= said
    assert any(word.startswith("--nodelist=") for word in said) == (name == "buffer")
    assert ("--constraint=h100" in said) == (name == "generator-big-0")


def test_several_nodes_need_an_address_that_the_others_reach_and_all_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_of: type[SlurmLauncher]
) -> None:
    assert asyncio.run(launcher_of(tmp_path, settings()).open()) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"localhost has the address 127.0.0.1.*set network.host"):
        asyncio.run(launcher_of(tmp_path, settings("launcher.nodes=2")).open())
    given = settings("launcher.nodes=2", "network.host=10.0.0.1")
    assert asyncio.run(launcher_of(tmp_path, given).open()) == "127.0.0.1"
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ConfigError, match="not running inside a Slurm job"):
        asyncio.run(SlurmLauncher(tmp_path, settings()).open())


def test_the_first_node_of_a_job_refuses_a_plan_that_does_not_fit_its_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = settings("launcher.nodes=2", "launcher.gpus_per_node=8", "model.dtype=bfloat16")
    node = Machine(cores=(0, 1), num_gpus=8, memory_mb=2 << 20, gpu_mb=24 << 10)
    monkeypatch.setattr(supervise_run, "config_of", lambda _: config)
    monkeypatch.setattr(supervise_run, "this_machine", lambda: node)
    monkeypatch.setattr(checks, "model_shape", lambda _: shape_from_hf(EIGHT_BILLION))
    monkeypatch.setattr(sys, "argv", ["supervise_run", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"does not fit its GPU: .* one GPU has 24\.0 GB"):
        supervise_run.main()
