"""Checks of the promises about states and staleness over the whole history of a store.

The promises: every group is in one state and reached it by allowed changes; no prompt was left out
or issued twice; admission kept its bound; nothing over age was leased or trained; in the surviving
history steps follow each other without a gap, each trained exactly its groups, and each group was
trained once; what may still be trained is stored. The queries are in audit.toml, the tables in
schema.py.

The history of compacted groups is deleted. Only their counts are checked, and the audit reports it.
"""

from collections.abc import Iterator

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.schema import SCHEMA_VERSION, expected_schema, schema_of
from async_rl.config.run import BufferConfig
from async_rl.core.frozen import Value
from async_rl.core.packaged import read_packaged

# One cause usually breaks a promise for thousands of groups.
_MAX_REPORTED = 20


# The sentences by kind, with their queries.
_CHECKS = read_packaged(__package__, "audit.toml", dict[str, dict[str, str]])


class Audit(Value):
    """The number of checked rows, and the broken promises as sentences, at most 20. unchecked: what
    could not be checked, as sentences.
    """

    num_groups: int
    num_transitions: int
    num_steps: int
    num_undone_steps: int
    problems: list[str]
    unchecked: list[str]


def audit(connection: Connection, buffer: BufferConfig) -> Audit:
    """Read everything once. The connection must show one moment (`ledger.reading`)."""

    def selected(kind: str) -> Iterator[str]:
        settings = buffer.model_dump()
        for sentence, query in _CHECKS[kind].items():
            for row in connection.execute(_CHECKS["common"]["tables"] + query, settings):
                yield sentence.format(*row)

    def count(query: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {query}").fetchone()[0])

    problems = (
        []
        if schema_of(connection) == expected_schema()
        else [f"the tables, indexes or views are not those of schema {SCHEMA_VERSION}"]
    )
    problems += selected("damaged")
    # A damaged file would be reported as a breach of promises.
    if not problems:
        problems = list(selected("broken"))
    num_more = len(problems) - _MAX_REPORTED
    if num_more > 0:
        problems[_MAX_REPORTED:] = [f"and {num_more} more"]
    return Audit(
        num_groups=count("groups"),
        num_transitions=count("transitions"),
        num_steps=count("steps WHERE undone_s IS NULL"),
        num_undone_steps=count("steps WHERE undone_s IS NOT NULL"),
        problems=problems,
        unchecked=list(selected("unchecked")),
    )
