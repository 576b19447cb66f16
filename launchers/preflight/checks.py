"""Checks on this machine before a run starts: files, ports, cores, memory, disk, the run's name.

Invariants: a check leaves no files or open ports; every problem is one line with path, value and
remedy; all problems are reported together.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from async_rl.composition.hardware import model_shape
from async_rl.composition.schema import flatten
from async_rl.config.base import as_builtins
from async_rl.config.checks.run import machine_problems, raise_if_any
from async_rl.config.generation import ENGINES, is_local_model
from async_rl.config.plugins import (
    ADVANTAGE,
    AGENT,
    CORRECTION,
    ENGINE,
    GRADIENT,
    POLICY_LOSS,
    SELECTION,
    load_function,
    load_rollout,
)
from async_rl.config.rewards import RewardModelTerm
from async_rl.config.run import RunConfig
from async_rl.config.sampling import supports_of
from async_rl.core.errors import ConfigError, DataError, InfrastructureError
from async_rl.core.extras import missing
from async_rl.core.machine import Machine, package_problem
from async_rl.core.schemas import require_applied
from async_rl.data.model_files import cached, model_problems, no_directory
from async_rl.launchers.backends.backend import backend_of
from async_rl.launchers.preflight.inputs import vllm_problems
from async_rl.planning.estimate import disk_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.presets import fleet
from async_rl.rewards.functions import check_functions
from async_rl.rewards.verifier.commands import load_headers
from async_rl.sandbox.cell import CellFailed
from async_rl.sandbox.cells import package_paths
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror
from async_rl.weights.gate import rank_problems
from async_rl.wire.addresses import LOOPBACK, host_for_people, supervisor_host

_ALGORITHM_PLUGINS = {
    "algorithm.policy_loss.fn": POLICY_LOSS,
    "algorithm.policy_loss.correction.fn": CORRECTION,
    "algorithm.advantage.fn": ADVANTAGE,
    "algorithm.step_scale.fn": GRADIENT,
}


def preflight(config: RunConfig, machine: Machine, *, run_dir: Path | None = None) -> None:
    """Raise ConfigError with one line per problem that would stop the run on this machine.

    run_dir: of a run that is resumed; None = a new run, whose directory must not exist yet.
    """
    raise_if_any(_problems(config, machine, run_dir))


def _problems(config: RunConfig, machine: Machine, run_dir: Path | None) -> Iterator[str]:
    # First: with mixed packages every later import may fail in another way.
    mixed = package_problem()
    if mixed:
        yield mixed
    yield from machine_problems(config, machine)
    yield from _model_problems(config)
    yield from _directory_problems(config, machine, run_dir)
    if run_dir is None:
        yield from _mirror_problems(config)
    yield from _network_problems(config)
    # The ranks of a broadcast connect in a tree.
    ranks = config.learner.ranks
    per_machine = ranks if config.launcher.is_one_machine else max(config.node_ranks, 1)
    yield from rank_problems(ranks, per_machine=per_machine)
    yield from backend_of(config).problems(config)
    yield from _package_problems(config)
    yield from _grammar_problems(config)
    for package in config.sandbox.packages:
        try:
            package_paths(package)
        except CellFailed as error:
            yield f"sandbox.packages={package}: {error}"
    yield from _problem(load_headers, config.sandbox.checker_headers)
    yield from check_functions(config.reward)
    if config.data.train_files:
        # Imports the reading of data, which --help and runs of the embedded task do not need.
        from async_rl.launchers.preflight.inputs import row_problems

        yield from row_problems(config)
    yield from _problem(load_rollout, config.rollout)
    yield from _plugin_problems(config)
    # Workers look the program up in the same PATH.
    if config.agent.command and shutil.which(config.agent.command[0]) is None:
        yield (
            f"rollout.fn={config.agent.command}: the program {config.agent.command[0]} was not"
            " found; name an installed program, or give its path"
        )
    yield from memory_problems(config, machine)


def memory_problems(config: RunConfig, machine: Machine) -> list[str]:
    """Return why the run does not fit this machine, or the nodes of which this machine is one."""
    shape = model_shape(config)
    whole = fleet(config, machine)
    if shape is None or whole is None:
        return []
    return fit_problems(config, shape, whole)


def _package_problems(config: RunConfig) -> Iterator[str]:
    """Yield the packages of extras that the run needs and that are not installed."""
    packages = ("torch", "transformers", "tensorboard", "starlette", "uvicorn")
    needed = dict.fromkeys(packages, "a run")
    if config.generation.is_vllm:
        needed["vllm"] = "generation.engine=vllm"
        yield from vllm_problems(config.generation.vllm.extra)
    if config.monitoring.wandb is not None:
        needed["wandb"] = f"monitoring.wandb={config.monitoring.wandb}"
    problems = (missing(package, feature) for package, feature in needed.items())
    yield from filter(None, problems)


def _grammar_problems(config: RunConfig) -> Iterator[str]:
    for path, support in zip(("generation", "evaluation"), supports_of(config), strict=True):
        if support.grammar:
            # Imports torch.
            from async_rl.batching.support import compile_grammar

            try:
                compile_grammar(support)
                require_applied(support)
            except DataError as error:
                yield f"{path}.sampling: {error}; give a grammar that xgrammar applies"


def _plugin_problems(config: RunConfig) -> Iterator[str]:
    """Yield the functions that cannot be loaded or called."""
    chosen = dict(flatten(as_builtins(config.algorithm), "algorithm."))
    for setting, kind in _ALGORITHM_PLUGINS.items():
        if setting in chosen:
            yield from _problem(load_function, setting, chosen[setting], kind)
    if config.data.order not in SELECTION.built_in:
        yield from _problem(load_function, "data.order", config.data.order, SELECTION)
    if config.agent.fn is not None:
        yield from _problem(load_function, "rollout.fn", config.agent.fn, AGENT)
    if config.generation.engine not in ENGINES:
        yield from _problem(load_function, "generation.engine", config.generation.engine, ENGINE)


def _problem(load: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield the problem for which `load` raises ConfigError, if it does."""
    try:
        load(*arguments)
    except ConfigError as error:
        yield str(error)


def _model_problems(config: RunConfig) -> Iterator[str]:
    if config.data.tokenizer is not None and not Path(config.data.tokenizer).is_dir():
        yield (
            f"data.tokenizer={config.data.tokenizer}: there is no such directory; give one with a"
            " tokenizer, or null for the model's own"
        )
    for name, term in config.reward.terms.items():
        if not isinstance(term, RewardModelTerm):
            continue
        if is_local_model(term.path) and not Path(term.path).is_dir():
            yield no_directory(term.path, f"reward.terms.{name}.path")
    model = config.model.path
    if model is None:
        return
    if Path(model).is_dir():
        yield from model_problems(config.model, Path(model))
    # A name without an owner is a directory that was misspelled, or in the cache.
    elif is_local_model(model) or ("/" not in model and cached(model) is None):
        yield no_directory(model)


def _directory_problems(config: RunConfig, machine: Machine, run_dir: Path | None) -> Iterator[str]:
    output_dir = Path(config.output_dir)
    if run_dir is None and config.run_name and (output_dir / config.run_name).exists():
        yield (
            f"run_name={config.run_name}: {config.output_dir}/{config.run_name} exists already;"
            " choose another, or remove it"
        )
    # The directory of the runs is made by the first run.
    existing = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield (
            f"output_dir={config.output_dir}: {existing} is not a directory that may be written to;"
            " set output_dir to one that is"
        )
        return
    free_mb = machine.disk_mb
    # A described machine (--machine) has its own size.
    if free_mb is None:
        free_mb = shutil.disk_usage(existing).free // 2**20
    # A full disk stops a run in the middle of a checkpoint.
    needed_mb = disk_mb(config, model_shape(config))
    if run_dir is not None:
        needed_mb -= _present_mb(run_dir)
    if free_mb < needed_mb:
        yield (
            f"output_dir={config.output_dir}: {free_mb} MB are free there, the run needs about"
            f" {needed_mb} MB; free some, set output_dir to another disk, or lower checkpoint.keep"
        )


def _present_mb(run_dir: Path) -> int:
    """The part of the run's space that is on the disk already: checkpoints, store, metrics."""
    saved = (checkpoints.directory_of(run_dir, v) for v in checkpoints.versions(run_dir))
    paths = (path for directory in (run_dir, *saved) for path in directory.iterdir())
    return sum(path.stat().st_size for path in paths if path.is_file()) >> 20


def _mirror_problems(config: RunConfig) -> Iterator[str]:
    mirror = config.checkpoint.mirror
    name = config.run_name
    if mirror is None:
        return
    try:
        # Also without a name, because the mirror may be unusable.
        if Mirror(mirror, Path(name or "run")).versions() and name:
            yield (
                f"checkpoint.mirror={mirror}: holds a run {name} already; choose another run_name,"
                f" or async-rl resume {mirror}/{name}"
            )
    except InfrastructureError as error:
        yield str(error)


def _network_problems(config: RunConfig) -> Iterator[str]:
    if config.launcher.is_submitted:
        return  # the job may start on any node, which looks at them when it binds them
    if unknown := [*_problem(supervisor_host, config.network, LOOPBACK)]:
        yield from unknown
        return
    host = host_for_people(config.network)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = {
        "network.host": 0,
        "monitoring.tensorboard_port": config.monitoring.tensorboard_port,
        "monitoring.prometheus_port": config.monitoring.prometheus_port,
    }
    for path, port in ports.items():
        try:
            # A port of null opens nothing; any free one is as good.
            socket.create_server((host, port or 0), family=family).close()
        except OSError as error:
            # create_server adds the address to the reason.
            reason = str(error.strerror).partition(" (")[0]
            yield (
                f"{path}={port or host}: {host}:{port or 0} cannot be bound ({reason}); choose"
                " another address of this machine, or port 0 for a free one"
            )
            if not port:
                return  # the address itself is wrong, whatever the port
