"""The embedded task and its models: the files are what their makers make, and the makers right."""

from async_rl.data.files import read_rows
from async_rl.data.prompts import embedded_rows
from benchmarks.embedded import list_functions


def test_the_rows_are_those_of_the_specs_and_both_wordings_of_one_are_on_one_side() -> None:
    specs, texts = [], []
    for part, of_part in zip(("train", "held_out"), list_functions.split(), strict=True):
        rows = [row for _, row in read_rows(embedded_rows(part))]
        assert rows == list_functions.rows(of_part)
        assert len({row["id"] for row in rows}) == len(rows) == 2 * len(of_part)
        specs.append({row["id"].partition("/")[0] for row in rows})
        texts.append({row["prompt"] for row in rows})
    assert not specs[0] & specs[1]
    assert not texts[0] & texts[1]
