"""The computed times of a push, and their table on the page."""

import pytest

from benchmarks.weights import push_model
from benchmarks.weights.push_model import Rates


def test_the_page_has_the_table_of_the_default_rates_and_the_command_compares_shapes() -> None:
    assert push_model.table(Rates()) in push_model.PAGE.read_text()
    assert "| 8B | 64 | 0.28 s | 0.27 s | 0.27 s | 0.36 s | 0.028 s |" in push_model.shapes(Rates())


def test_the_slowest_of_the_stages_that_overlap_counts_and_groups_divide_the_ranks() -> None:
    rates = Rates(bus=20, link=40, load=60, net_hop=1000, gpu_hop=100)
    assert push_model.publish_s(100, rates) == pytest.approx(100 / 20)
    # 17 ranks on 3 nodes.
    ring_s = 3 * 1e-3 + 14 * 1e-4
    for senders, rate in ((1, 20), (2, 40), (8, 60)):
        found = push_model.pause_s(100, 17, rates, senders=senders)
        assert found == pytest.approx(100 / rate + ring_s)
    # Each group: 9 ranks on 2 nodes.
    ring_s = 2 * 1e-3 + 7 * 1e-4
    for senders, rate in ((1, 10), (8, 60)):
        found = push_model.in_groups_s(100, 17, rates, groups=2, senders=senders)
        assert found == pytest.approx(100 / rate + ring_s)
    # 3 nodes, and 7 further ranks of the last one.
    assert push_model.by_nodes_s(100, 17, rates) == pytest.approx(100 / 20 + 3 * 1e-3 + 7 * 1e-4)
