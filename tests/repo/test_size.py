"""The product stays small enough for one person: three measures with limits that only fall."""

import subprocess
import tomllib
from itertools import pairwise

import pytest
from measures import LIMITS, limits, measured, tokens_of
from repository import ROOT, product

MAX_TOKENS_PER_LINE = 8.30
SLACK = 0.03
"""A limit further above its measure would let the product grow unseen."""
MEASURED = measured()


@pytest.mark.parametrize(
    ("group", "key"), [(group, key) for group, values in MEASURED.items() for key in values]
)
def test_a_measure_is_within_its_limit(group: str, key: str) -> None:
    limit = limits()[group].get(key)
    number = MEASURED[group][key]
    assert limit is not None, f"{key} has no limit in tests/repo/size.toml"
    assert number <= limit, "remove something of the same size; docs/decisions/size.md says why"
    assert number >= (1 - SLACK) * limit - 50, "run python tests/repo/measures.py --lower"


def test_every_limit_is_that_of_a_measure() -> None:
    known = limits()
    assert {group: known[group].keys() for group in MEASURED} == {
        group: values.keys() for group, values in MEASURED.items()
    }


def test_a_limit_that_was_raised_has_a_decision() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "decisions").glob("*.md"))
    raised = []
    for before, after in pairwise([*committed(), limits()]):
        raised += [
            f"{group} {key}"
            for group, values in after.items()
            for key, number in values.items()
            if number > before.get(group, {}).get(key, number)
        ]
    assert [one for one in raised if f"`{one}`" not in pages] == []


def committed() -> list[dict[str, dict[str, int]]]:
    """Return the versions of size.toml in the history that is there, the oldest first."""
    path = str(LIMITS.relative_to(ROOT))
    git = ["git", "-C", str(ROOT)]
    commits = subprocess.check_output([*git, "log", "--format=%H", "--", path], text=True).split()
    return [
        dict(tomllib.loads(subprocess.check_output([*git, "show", f"{commit}:{path}"], text=True)))
        for commit in reversed(commits)
    ]


def test_lines_are_not_packed() -> None:
    counts = [tokens_of(path.read_text()) for path in product()]
    num_tokens = sum(tokens for tokens, _ in counts)
    assert num_tokens / sum(lines for _, lines in counts) <= MAX_TOKENS_PER_LINE
