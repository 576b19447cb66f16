"""How many generators and verifiers are wanted, from the configuration or from `async-rl scale`, and how many there are.

Invariants: what was asked for last is in `<run>/scale.json`, so it outlives the supervisor; a number that cannot be is refused before
anything changes.
Used by the supervisor; the command line reads the file to show what a resumed run will start.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.config import RunConfig
from async_rl.config_check import machine_problems, raise_if_any
from async_rl.errors import ConfigError, InfrastructureError
from async_rl.machine import Machine
from async_rl.processes.registry import DRAINING, Registry
from async_rl.topology import POOLS, ProcessSpec, pools, processes, scaled
from async_rl.types import Pool

SCALE_FILE = "scale.json"


def last_asked(run_dir: Path) -> dict[str, int]:
    """What `async-rl scale` asked for last in this run, by pool; empty if nothing. Raises ConfigError if the file is broken."""
    try:
        return msgspec.json.decode((run_dir / SCALE_FILE).read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{run_dir / SCALE_FILE} cannot be read ({error}); remove it to go on as configured") from error


def check_counts(config: RunConfig, counts: Mapping[str, int], machine: Machine) -> None:
    """Raises ConfigError unless the run can have so many processes of each pool."""
    for name, count in counts.items():
        if name not in pools(config):
            near = "".join(f"did you mean {close}? " for close in difflib.get_close_matches(name, pools(config), 1))
            raise ConfigError(f"{name}={count}: there is no such pool; {near}they are {', '.join(pools(config))}")
        if count < (least := 1 if name == "verifiers" else 0):
            raise ConfigError(f"{name}={count}: must be at least {least}")
    raise_if_any(machine_problems(scaled(config, counts), machine))


class Scaling:
    """The wanted number of processes of one run."""

    def __init__(self, config: RunConfig, run_dir: Path, machine: Machine, log: logging.Logger) -> None:
        self._config = config
        self._file = run_dir / SCALE_FILE
        self._machine = machine
        self._log = log
        self.counts = pools(config) | last_asked(run_dir)

    def specs(self) -> list[ProcessSpec]:
        """Every process that is wanted now."""
        return processes(scaled(self._config, self.counts), self._machine)

    def ask(self, counts: Mapping[str, int]) -> None:
        """From now on so many are wanted. Raises ConfigError if that cannot be, InfrastructureError if it cannot be written down."""
        check_counts(self._config, counts, self._machine)
        wanted = self.counts | dict(counts)
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(wanted))
            partial.replace(self._file)
        except OSError as error:
            raise InfrastructureError(f"{self._file} cannot be written ({error}); nothing has changed") from error
        self._log.info("wanted from now on: %s", ", ".join(f"{name} {number} (was {self.counts[name]})" for name, number in wanted.items()))
        self.counts = wanted

    def state(self, registry: Registry) -> dict[str, Pool]:
        """How many are wanted and how many there are, by pool."""
        states: dict[str, list[str]] = {name: [] for name in self.counts}
        for member in registry.members:
            if member.role in POOLS:
                is_between = member.state in ("starting", DRAINING)
                state = member.state if is_between else "live" if registry.is_serving(member.name) else "ended"
                states[POOLS[member.role]].append(state)
        return {
            name: Pool(wanted=self.counts[name], starting=found.count("starting"), live=found.count("live"), draining=found.count(DRAINING))
            for name, found in states.items()
        }
