"""Compute the seconds of a push over NCCL to fleets larger than a measured one, from named rates.

Run: `python -m benchmarks.weights.push_model [--write] [--link 45] ...`; `--write` puts the first
table into docs/performance.md. The second table compares one ring with other shapes. The stages
follow the code: rank 0 gathers and copies to the block, which is page-locked, while training waits;
then the pieces of the learner's ranks on its machine pass in turn through their GPUs and NCCL's
ring while generation is paused. Stages overlap, so the slowest counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.core.frozen import frozen
from benchmarks.figures import with_table

PAGE = Path(__file__).parents[2] / "docs/performance.md"
MODELS = {"8B": (8.2e9, 1), "70B": (70.6e9, 8), "235B": (235e9, 8)}
"""Parameters, and GPUs of an engine."""
ENGINES = (64, 512, 4096)
_PER_NODE = 8


@frozen
class Rates:
    """Rates in GB/s, times of a hop in microseconds, shares as numbers between 0 and 1.

    bus: between GPU and page-locked memory. link: one network card of a node. load: into an
    engine's model on one GPU. net_hop, gpu_hop: until a rank of the ring passes on the first part,
    to another node and inside one. changed: share of a version's bytes that the lists of its
    changed words have. apply: of a version whose tensors are filled with marks and then copied
    where there is none, in the memory of one GPU.
    """

    bus: float = 55.0  # measured on an H200
    link: float = 45.0
    load: float = 60.0
    net_hop: float = 100.0
    gpu_hop: float = 30.0
    changed: float = 0.0239  # four bytes for each changed word at a learning rate of 5e-6
    apply: float = 1000.0


def publish_s(size_gb: float, rates: Rates) -> float:
    """Return the seconds for which training waits."""
    return size_gb / min(rates.link, rates.bus)


def ring_s(num_ranks: int, rates: Rates) -> float:
    """Return the seconds until the last rank of NCCL's ring gets the first part. Ranks of a node
    are neighbors in it.
    """
    num_nodes = -(-num_ranks // _PER_NODE)
    return 1e-6 * (num_nodes * rates.net_hop + (num_ranks - num_nodes) * rates.gpu_hop)


def changes_s(size_gb: float, num_ranks: int, rates: Rates) -> float:
    """Return the seconds for which generation pauses, with the changed words only."""
    return pause_s(rates.changed * size_gb, num_ranks, rates) + size_gb / rates.apply


def pause_s(size_gb: float, num_ranks: int, rates: Rates, *, senders: int = 1) -> float:
    """Return the seconds for which generation pauses, with the version from one or more ranks."""
    rate = min(senders * min(rates.bus, rates.link), rates.load)
    return size_gb / rate + ring_s(num_ranks, rates)


def by_nodes_s(size_gb: float, num_ranks: int, rates: Rates, *, senders: int = 1) -> float:
    """Return the seconds of `pause_s` if only one rank of each node were in the ring, and passed
    the pieces on inside its node.
    """
    num_nodes = -(-num_ranks // _PER_NODE)
    way_s = 1e-6 * (num_nodes * rates.net_hop + (_PER_NODE - 1) * rates.gpu_hop)
    return pause_s(size_gb, num_ranks, rates, senders=senders) - ring_s(num_ranks, rates) + way_s


def in_groups_s(
    size_gb: float, num_ranks: int, rates: Rates, *, groups: int, senders: int = 1
) -> float:
    """Return the seconds of `pause_s` if the ranks were divided into groups, each with a ring of
    its own: the senders send the version once for each.
    """
    rate = min(senders / groups * min(rates.bus, rates.link), rates.load)
    return size_gb / rate + ring_s(-(-num_ranks // groups), rates)


def shapes(rates: Rates) -> str:
    """Return the table of one ring against other shapes."""
    rows = [
        "| model | engines | all weights from eight ranks: one ring | by nodes | 2 groups |"
        " 8 groups | changed words from one rank: one ring | by nodes | 2 groups | 8 groups |",
        "|" + "---|" * 10,
    ]
    for name, (parameters, gpus) in MODELS.items():
        size_gb = 2 * parameters / 1e9
        for engines in ENGINES:
            times = []
            for sent_gb, senders, more_s in (
                (size_gb, 8, 0.0),
                (rates.changed * size_gb, 1, size_gb / rates.apply),
            ):
                given = (sent_gb, senders + engines * gpus, rates)
                times.append(more_s + pause_s(*given, senders=senders))
                times.append(more_s + by_nodes_s(*given, senders=senders))
                for groups in (2, 8):
                    times.append(more_s + in_groups_s(*given, groups=groups, senders=senders))
            cells = " | ".join(f"{time_s:.2g} s" for time_s in times)
            rows.append(f"| {name} | {engines:,} | {cells} |")
    return "\n".join(rows) + "\n"


def table(rates: Rates) -> str:
    """Return the table of the page."""
    rows = [
        "| model | engines | training waits | generation pauses: one rank sends |"
        " eight ranks send | one sends the changed words only |",
        "|---|---|---|---|---|---|",
    ]
    for name, (parameters, gpus) in MODELS.items():
        size_gb = 2 * parameters / 1e9
        for engines in (ENGINES[0], ENGINES[-1]):
            ranks = 1 + engines * gpus
            times = (
                publish_s(size_gb, rates),
                pause_s(size_gb, ranks, rates),
                pause_s(size_gb, ranks + 7, rates, senders=8),
                changes_s(size_gb, ranks, rates),
            )
            cells = " | ".join(f"{time_s:.2g} s" for time_s in times)
            rows.append(f"| {name} | {engines:,} | {cells} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    for name in Rates.__annotations__:
        parser.add_argument(f"--{name}", type=float, default=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    is_written = given.pop("write")
    rates = Rates(**given)
    if is_written:
        PAGE.write_text(with_table(PAGE.read_text(), "pushes", table(rates)))
    else:
        print(table(rates), shapes(rates), sep="\n")


if __name__ == "__main__":
    main()
