"""The computed times of a push, and their table on the page."""

from __future__ import annotations

import pytest

from benchmarks.weights.push_model import (
    PAGE,
    Rates,
    by_nodes_s,
    in_groups_s,
    pause_s,
    publish_s,
    shapes,
    table,
)


def test_the_page_has_the_tables_of_the_default_rates() -> None:
    assert table(Rates()) in PAGE.read_text()
    assert shapes(Rates()) in PAGE.read_text()


def test_the_slowest_of_the_stages_that_overlap_counts() -> None:
    rates = Rates(bus=20, link=40, load=60, net_hop=1000, gpu_hop=100)
    assert publish_s(100, rates) == pytest.approx(100 / 20)
    # 17 ranks on 3 nodes.
    ring_s = 3 * 1e-3 + 14 * 1e-4
    assert pause_s(100, 17, rates) == pytest.approx(5 + ring_s)
    assert pause_s(100, 17, rates, senders=2) == pytest.approx(100 / 40 + ring_s)
    assert pause_s(100, 17, rates, senders=8) == pytest.approx(100 / 60 + ring_s)


def test_groups_divide_the_ranks_and_the_rate_of_the_senders() -> None:
    rates = Rates(bus=20, link=40, load=60, net_hop=1000, gpu_hop=100)
    # Each group: 9 ranks on 2 nodes.
    ring_s = 2 * 1e-3 + 7 * 1e-4
    assert in_groups_s(100, 17, rates, groups=2) == pytest.approx(100 / 10 + ring_s)
    assert in_groups_s(100, 17, rates, groups=2, senders=8) == pytest.approx(100 / 60 + ring_s)
    # 3 nodes, and 7 further ranks of the last one.
    assert by_nodes_s(100, 17, rates) == pytest.approx(100 / 20 + 3 * 1e-3 + 7 * 1e-4)
