"""Overrides given in Python mean the same as those of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import compose
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.composition.choices import CONF_DIR
from async_rl.composition.overrides import as_words, read_overrides
from async_rl.core.errors import ConfigError


def test_nested_and_dotted_mappings_and_words_are_the_same() -> None:
    nested = {"num_steps": 20, "learner": {"optimizer": {"lr": 1e-6}}}
    dotted = {"num_steps": 20, "learner.optimizer.lr": 1e-6}
    words = ["num_steps=20", "learner.optimizer.lr=1e-06"]
    assert as_words(nested) == as_words(dotted) == as_words(words) == words
    assert compose("grpo_code", as_words(nested)) == compose("grpo_code", words)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run_name", "007"),
        ("run_name", "null"),
        ("run_name", None),
        ("run_name", 'a "quoted" name, with = and [brackets]'),
        ("output_dir", Path("/tmp/my runs")),
        ("data.train_files", ["/a b.jsonl", "/c,d.jsonl"]),
        ("learner.gradient_checkpointing", True),
        ("learner.cores", [0, 1]),
    ],
)
def test_a_value_arrives_as_it_was_given(path: str, value: object) -> None:
    given = read_overrides(as_words({path: value}), [CONF_DIR])
    assert given.problems == []
    tree = given.values[path]
    expected = str(value) if isinstance(value, Path) else value
    assert tree == expected
    assert type(tree) is type(expected) or isinstance(expected, list)


@settings(deadline=None)  # the first example pays for the import of hydra's grammar
@given(st.text(st.characters(codec="ascii", exclude_characters="$"), min_size=1))
def test_any_text_arrives_as_it_was_given(text: str) -> None:
    found = read_overrides(as_words({"run_name": text}), [CONF_DIR])
    assert (found.problems, found.values) == ([], {"run_name": text})


@pytest.mark.parametrize("text", ["a\\b", "back\\", 'a\\"b c', "=\\d+"])
def test_backslashes_of_the_command_line_are_kept(text: str) -> None:
    found = read_overrides([f"run_name={text}"], [CONF_DIR])
    assert (found.problems, found.values) == ([], {"run_name": text})


def test_a_file_of_a_group_can_be_chosen() -> None:
    assert compose("grpo_code", as_words({"algorithm": "rloo"})) == compose(
        "grpo_code", ["algorithm=rloo"]
    )


def test_an_entry_of_a_mapping_can_be_given() -> None:
    pools = {"big": {"count": 2, "work": "train"}}
    config = compose("grpo_code", as_words({"generators": {"pools": pools}}))
    assert config.generators.pools["big"].count == 2


def test_a_single_text_is_refused_with_the_list_to_give() -> None:
    with pytest.raises(ConfigError, match=r"give a list, as in \['num_steps=1'\]"):
        as_words("num_steps=1")
