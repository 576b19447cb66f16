"""A launcher is added without a change elsewhere, and is asked what it can do, not which it is."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

import pytest

from async_rl.composition.compose import compose
from async_rl.composition.schema import variants
from async_rl.config.launchers import LaunchConfig
from async_rl.config.run import RunConfig
from async_rl.launchers.api import starting
from async_rl.launchers.backends.backend import Backend, Job, backend_of, job_to_submit


class PaperLaunch(LaunchConfig):
    """A launcher of this test."""

    kind: Literal["paper"]
    is_submitted: ClassVar = True


def add(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    module = ModuleType("async_rl.launchers.backends.paper")
    vars(module)["BACKEND"] = backend
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_every_launcher_of_conf_has_a_backend_and_says_what_it_can_do() -> None:
    for kind in variants()["launcher"]:
        config = compose("grpo_code", [f"launcher={kind}", "hardware=cpu"])
        backend = backend_of(config)
        assert isinstance(backend, Backend)
        assert config.launcher.is_submitted == (backend.job is not None)
        assert config.launcher.is_one_machine == (kind == "local")


def test_a_launcher_of_another_module_starts_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submitted = []

    def submit(config: RunConfig, run_dir: Path) -> str:
        submitted.append(run_dir)
        return "7"

    job = Job(script=lambda *_: "", submit=submit, is_inside=lambda: False)
    problem = "launcher=paper: no paper is left"
    made = Backend(make=lambda *_: None, problems=lambda _: iter([problem]), job=job)
    add(monkeypatch, made)
    config = compose("grpo_code", ["monitoring.tensorboard_port=null"])
    config = config.model_copy(update={"launcher": PaperLaunch(kind="paper")})
    assert list(backend_of(config).problems(config)) == [problem]
    starting.start(config, tmp_path)
    assert submitted == [tmp_path]
    add(monkeypatch, replace(made, job=replace(job, is_inside=lambda: True)))
    assert job_to_submit(config) is None, "inside its job the supervisor starts here"
