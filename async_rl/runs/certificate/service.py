"""The statements about a training service: its requests and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from async_rl.buffer.store.connection import connect
from async_rl.core.checksums import damage
from async_rl.core.errors import Unavailable
from async_rl.runs.certificate.statements import Statement, statement
from async_rl.service.address import FOLDER, STORE_FILE

_GAPS = """
SELECT owner, 1 + max(seq_id) - count(*) FROM requests
WHERE kind NOT IN ('sample', 'create_custom_loss') AND answered_s IS NOT NULL GROUP BY owner
"""


def service(run_dir: Path) -> Iterator[Statement]:
    """Yield the statements. Raises Unavailable if there is no table of requests yet."""
    file = run_dir / FOLDER / STORE_FILE
    if not file.is_file():
        raise Unavailable(f"{file} does not exist: the service has accepted nothing yet")
    with contextlib.closing(connect(file)) as store:
        gaps = store.execute(_GAPS).fetchall()
        count = "SELECT count(*), count(answered_s) FROM requests"
        accepted, answered = store.execute(count).fetchone()
        saved = "SELECT path, directory FROM checkpoints WHERE NOT is_gone"
        checkpoints = store.execute(saved).fetchall()
    yield statement(
        "requests",
        "each training run executed its requests in the order of their numbers, each once",
        broken=[f"{run} lacks {number} requests" for run, number in gaps if number],
        evidence=[f"{len(gaps)} training runs; {accepted} requests, {answered} answered"],
    )
    problems = {path: damage(Path(directory)) for path, directory in checkpoints}
    yield statement(
        "checkpoints",
        "the files of each checkpoint have their checksums",
        broken=[f"{path}: {problem}" for path, problem in problems.items() if problem],
        evidence=[f"{len(checkpoints)} checkpoints and weights of samplers"],
    )
