"""Facts about the table of refused combinations."""

from async_rl.composition.schema import find
from async_rl.config.checks.combinations import rows


def test_every_condition_is_about_a_setting() -> None:
    assert {path for row in rows() for path, _, _ in row.when if find(path) is None} == set()


def test_a_text_with_a_dot_is_the_path_of_a_setting() -> None:
    others = {other for row in rows() for _, _, other in row.when if isinstance(other, str)}
    assert {other for other in others if "." in other and find(other) is None} == set()
