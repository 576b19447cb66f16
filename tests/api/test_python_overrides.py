"""Overrides given in Python mean the same as those of the command line."""

from pathlib import Path

import pytest
from composing import compose
from hypothesis import example, given, settings
from hypothesis import strategies as st

from async_rl.composition.overrides import as_words, read_overrides
from async_rl.composition.schema import CONF_DIR
from async_rl.core.errors import ConfigError


def test_nested_and_dotted_mappings_and_words_are_the_same() -> None:
    nested = {"num_steps": 20, "learner": {"optimizer": {"lr": 1e-6}}}
    dotted = {"num_steps": 20, "learner.optimizer.lr": 1e-6}
    words = ["num_steps=20", "learner.optimizer.lr=1e-06"]
    assert as_words(nested) == as_words(dotted) == as_words(words) == words
    pools = {"big": {"count": 2, "work": "train"}}
    given = {**nested, "algorithm": "rloo", "generators": {"pools": pools}}
    config = compose("grpo_code", as_words(given))
    assert config.generators.pools["big"].count == 2
    words += ["algorithm=rloo", "generators.pools={big:{count:2,work:train}}"]
    assert config == compose("grpo_code", words)
    with pytest.raises(ConfigError, match=r"give a list, as in \['num_steps=1'\]"):
        as_words("num_steps=1")


def test_values_arrive_as_they_were_given() -> None:
    values = {"run_name": None, "data.train_files": ["/a b.jsonl", "/c,d.jsonl"]}
    given = read_overrides(as_words(values | {"output_dir": Path("/tmp/my runs")}), [CONF_DIR])
    assert (given.problems, given.values) == ([], values | {"output_dir": "/tmp/my runs"})


@settings(deadline=None)  # the first example pays for the import of hydra's grammar
@example("null")
@example("007")
@given(st.text(st.characters(codec="ascii", exclude_characters="$"), min_size=1))
def test_any_text_arrives_as_it_was_given(text: str) -> None:
    found = read_overrides(as_words({"run_name": text}), [CONF_DIR])
    assert (found.problems, found.values) == ([], {"run_name": text})
