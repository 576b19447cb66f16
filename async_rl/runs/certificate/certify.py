"""Makes the certificate of a run, live or finished, from its files. Reads only.

The statements are in the order in which a reader trusts them: weights, prompts, selection,
log-probs, seeds, origin, faults, and the audit of the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from async_rl.buffer.store.audit import Audit, Promise, audit
from async_rl.buffer.store.connection import STORE_FILE, Connection
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.reader import LEARNER_VERSION
from async_rl.config.run import RunConfig
from async_rl.core import records
from async_rl.core.ranges import ranges
from async_rl.monitoring.events import EVENTS_FILE, Event
from async_rl.runs.certificate.faults import faults
from async_rl.runs.certificate.origin import origin
from async_rl.runs.certificate.prompts import prompts
from async_rl.runs.certificate.pushes import weights
from async_rl.runs.certificate.seeds import seeds
from async_rl.runs.certificate.selection import selection
from async_rl.runs.certificate.service import service
from async_rl.runs.certificate.statements import Certificate, Statement, statement
from async_rl.runs.metrics import Curves
from async_rl.runs.status import config_of
from async_rl.training import checkpoints

_AGREEMENT = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats: mean difference of engine and learner at age 0. In float32 both differ by 2e-5, in bfloat16
by 0.02 (docs/hardware.md).
"""


def certify(run_dir: Path) -> Certificate:
    """Return the certificate. Raises ConfigError or InfrastructureError if the configuration or the
    store cannot be read.
    """
    config = config_of(run_dir)
    with reading(run_dir / STORE_FILE) as store:
        statements = list(_statements(run_dir, config, store))
    return Certificate(run=run_dir.name, made_s=time.time(), statements=statements)


def audited(run_dir: Path, config: RunConfig, store: Connection) -> Audit:
    """Return the audit of the ledger, with the damaged checkpoints."""
    checked = audit(store, promise_of(config))
    problems = [*checked.problems, *checkpoints.damaged(run_dir)]
    return msgspec.structs.replace(checked, problems=problems)


def promise_of(config: RunConfig) -> Promise:
    """Return the bounds that the audit checks."""
    buffer = config.buffer
    return Promise(
        groups_per_step=buffer.groups_per_step,
        max_staleness_versions=buffer.max_staleness_versions,
        age_rule=buffer.age_rule,
    )


def _statements(run_dir: Path, config: RunConfig, store: Connection) -> Iterator[Statement]:
    noted = list(records.read(run_dir / EVENTS_FILE, Event))
    curves = Curves(run_dir)
    curves.refresh()
    if config.agent.is_service:
        # Programs bring the prompts, and the weights are theirs.
        yield from service(run_dir)
    else:
        yield from weights(run_dir)
        yield from prompts(run_dir, config, store, [e for e in noted if e.kind == "start"])
        yield from selection(store)
        yield _agreement(curves, config.model.dtype)
        yield from seeds(config, store)
    yield from origin(run_dir, config, noted)
    yield from faults(store, noted)
    checked = audited(run_dir, config, store)
    yield statement(
        "audit",
        "the ledger and the checkpoints keep their promises (async-rl ledger --audit)",
        broken=checked.problems,
        evidence=[
            f"{checked.num_groups} groups, {checked.num_transitions} changes of state,"
            f" {checked.num_steps} steps",
            *checked.unchecked,
        ],
    )
    (version,) = store.execute(LEARNER_VERSION).fetchone()
    steps = set(curves.points("time_s")[0])
    missing = [step for step in range(1, version + 1) if step not in steps]
    yield statement(
        "audit",
        "metrics.jsonl has a row for each step",
        # A power loss takes rows; the newest may wait for its evaluation.
        unknown=[f"the rows of the steps {ranges(missing)} are missing"] if missing else (),
        evidence=[f"{len(steps)} rows for {version} steps"],
    )


def _agreement(curves: Curves, dtype: str) -> Statement:
    limit = _AGREEMENT[dtype]
    _, fresh = curves.points("mismatch/engine_abs_mean")
    _, stale = curves.points("mismatch/stale_abs_mean")
    is_off = len(fresh) and not np.median(fresh) <= limit
    return statement(
        "log-probs",
        f"at age 0 engine and learner agree within {limit:g} nats (model.dtype={dtype})",
        broken=[f"half of the steps differ by more than {limit:g} nats"] if is_off else (),
        unknown=[] if len(fresh) else ["no step trained a sample of the learner's own version"],
        evidence=[
            f"{what}: {values.mean():.2g} nats on average over {len(values)} steps,"
            f" {values.max():.2g} in the worst one"
            for values, what in ((fresh, "age 0"), (stale, "older samples"))
            if len(values)
        ],
    )
