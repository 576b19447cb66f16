"""Rows, functions and keyword settings that a Python program gives to `launch`."""

import functools
import json
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from async_rl.config.plugins import REWARD, load_function
from async_rl.core.errors import ConfigError
from async_rl.launchers.api.launching import words_of

WANTED = {"answer": 3}
PATTERN = re.compile("a")


def test_a_keyword_is_a_path_a_section_or_the_last_part_of_a_name() -> None:
    assert words_of(["seed=3"], None, None, {"num_steps": 20, "lr": 1e-5}) == [
        "seed=3",
        "num_steps=20",
        "learner.optimizer.lr=1e-05",
    ], "the critic's lr is in more sections"
    assert words_of([], None, None, {"learner": {"ranks": 2}}) == ["learner.ranks=2"]
    assert words_of([], None, None, {"num_step": 2}) == ["num_step=2"], "reported when composed"
    with pytest.raises(ConfigError, match=r"^cores: is the last part of [a-z.]+cores and [a-z.]+"):
        words_of([], None, None, {"cores": 2})


def test_rows_are_a_file_next_to_the_runs_that_equal_rows_share(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1", "answer": "#### 2"}, {"prompt": "é", "answer": "#### 3"}]
    place = f"output_dir={tmp_path}"
    given = words_of([place], iter(rows), None, {})
    assert given == words_of([place], rows, None, {})
    (file,) = (tmp_path / "inputs").iterdir()
    assert given == [place, f'data.train_files=["{file}"]']
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    with pytest.raises(ConfigError, match="data: a row cannot be written as JSON"):
        words_of([place], [{"prompt": object()}], None, {})


def scored(sample: object) -> float:
    return 1.0


def test_a_function_of_a_module_travels_as_its_name(tmp_path: Path) -> None:
    given = words_of([f"output_dir={tmp_path}"], None, scored, {})
    assert given[1:] == [f'reward.terms.scored="{__file__}:scored"']
    given = words_of([f"output_dir={tmp_path}"], None, textwrap.dedent, {})
    assert given[1].endswith('textwrap.py:dedent"')
    given = words_of([f"output_dir={tmp_path}"], subprocess.run, None, {})
    assert not (tmp_path / "inputs").exists()


PROGRAM = """
from __future__ import annotations
import math as maths
from collections import Counter
import sys
from async_rl.launchers.api.launching import words_of

SCALE = {"half": 0.5}

def halved(value: Undefined) -> float:
    return value * SCALE["half"] if value else again(value)

def again(value):
    return halved(1) + maths.floor(0.5)

def limited(sample, *, most=sys.maxsize):
    return len(sample)

def score(sample, *, most=2):
    if sample == "again":
        return score("aa")
    return halved(len(sample)) + sum(maths.sqrt(c) for c in Counter(sample).values() if c < most)

for function in (score, limited):
    print(words_of(["output_dir=" + sys.argv[1]], None, function, {})[1])
"""


def test_a_function_of_a_program_travels_with_what_it_uses(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    score, limited = (re.findall(r'"(.*)"', line)[0] for line in done.stdout.splitlines())
    # A default has to be a constant: that of `most` is not written.
    with pytest.raises(ConfigError, match="name 'sys' is not defined"):
        load_function("reward.terms.limited", limited, REWARD)
    score = load_function("reward.terms.score", score, REWARD)
    assert score("aab") == 1.5 + 1
    assert score("again") == 1
    assert score("") == 0.5


def test_a_function_that_needs_more_than_its_source_is_refused(tmp_path: Path) -> None:
    place = [f"output_dir={tmp_path}"]
    wanted = 3

    def closed(sample: object) -> float:
        return wanted

    def uses_pattern(sample: str) -> bool:
        return bool(PATTERN.match(sample))

    def uses_constant(sample: object) -> float:
        return WANTED["answer"] + math.pi

    with pytest.raises(ConfigError, match="closed: uses wanted of the function around it"):
        words_of(place, None, closed, {})
    with pytest.raises(ConfigError, match="uses_pattern: uses PATTERN, a Pattern of this program"):
        words_of(place, None, uses_pattern, {})
    for nameless in (lambda sample: 1, functools.partial(scored), "text"):
        with pytest.raises(ConfigError, match="is not a function with a name; define one with def"):
            words_of(place, None, nameless, {})  # type: ignore[arg-type]
    assert not (tmp_path / "inputs").exists()
    name = words_of(place, None, uses_constant, {})[1].partition('"')[2].strip('"')
    assert load_function("reward.terms.uses_constant", name, REWARD)(None) == 3 + math.pi
