"""The computed times of a push, and their table on the page."""

from __future__ import annotations

import pytest

from benchmarks.weights.push_model import PAGE, Rates, pause_s, publish_s, table


def test_the_page_has_the_table_of_the_default_rates() -> None:
    assert table(Rates()) in PAGE.read_text()


def test_the_slowest_of_the_stages_that_overlap_counts() -> None:
    rates = Rates(bus=20, link=40, load=60, net_hop=1000, gpu_hop=100)
    assert publish_s(100, rates) == pytest.approx(100 / 20)
    # 17 ranks on 3 nodes.
    ring_s = 3 * 1e-3 + 14 * 1e-4
    assert pause_s(100, 17, rates) == pytest.approx(5 + ring_s)
    assert pause_s(100, 17, rates, senders=2) == pytest.approx(100 / 40 + ring_s)
    assert pause_s(100, 17, rates, senders=8) == pytest.approx(100 / 60 + ring_s)
