"""The computed times of a push, and their table on the page."""

from benchmarks.weights import push_model
from benchmarks.weights.push_model import Rates


def test_the_page_has_the_table_of_the_default_rates() -> None:
    assert push_model.table(Rates()) in push_model.PAGE.read_text()
