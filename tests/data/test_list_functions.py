"""The embedded task against plain execution of its own sources."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import msgspec
import pytest

from async_rl.core.types import CallTest, CodeProblem
from async_rl.examples.run_and_retry import second_prompt
from benchmarks.embedded import corpus, list_functions
from benchmarks.embedded.list_functions import (
    FILTERS,
    MAPS,
    REDUCTIONS,
    Spec,
    hidden_tests,
)
from benchmarks.embedded.vocabulary import END


def call(source: str, xs: list[int]) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["f"](list(xs))


def passes(source: str, problem: CodeProblem) -> bool:
    for test in problem.tests:
        assert isinstance(test, CallTest)
        try:
            value = call(source, test.args[0])
        except (ValueError, IndexError, TypeError):
            return False
        try:
            if msgspec.json.encode(value) != msgspec.json.encode(test.expected) or type(
                value
            ) is not type(test.expected):
                return False
        except TypeError:
            return False
    return True


def every_concept_once() -> list[Spec]:
    num = max(len(FILTERS), len(MAPS), len(REDUCTIONS))
    return [Spec(i % len(FILTERS), i % len(MAPS), i % len(REDUCTIONS)) for i in range(num)]


@pytest.mark.parametrize("spec", every_concept_once(), ids=lambda spec: spec.name)
def test_the_reference_source_computes_what_the_spec_computes(spec: Spec) -> None:
    rng = random.Random(1)
    for _ in range(20):
        xs = [rng.randint(-15, 15) for _ in range(rng.randint(0, 10))]
        value = call(spec.solution(), xs)
        assert (type(value), value) == (type(spec.run(xs)), spec.run(xs))
        # Tests travel as msgpack, with integers of 64 bits.
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == value


def test_reference_solutions_pass_their_hidden_tests_and_flaws_do_not() -> None:
    caught = []
    for spec in list_functions.split()[1][:150]:
        assert passes(spec.solution(), hidden_tests(spec))
        codes = [concept.code for concept in spec.concepts]
        for slot, concept in enumerate(spec.concepts):
            for flaw in concept.flaws:
                source = list_functions.program(
                    *(flaw if i == slot else code for i, code in enumerate(codes))
                )
                caught.append(not passes(source, hidden_tests(spec)))
    assert sum(caught) / len(caught) > 0.9


def test_a_right_value_of_the_wrong_type_fails() -> None:
    halving_and_sum = next(
        Spec(f, m, r)
        for f, m, r in itertools.product(
            range(len(FILTERS)), range(len(MAPS)), range(len(REDUCTIONS))
        )
        if (FILTERS[f].code, MAPS[m].code, REDUCTIONS[r].code)
        == ("x % 2 == 0", "x // 2", "sum(ys)")
    )
    as_float = list_functions.program("x % 2 == 0", "x / 2", "sum(ys)")
    assert call(as_float, [2, 4]) == halving_and_sum.run([2, 4])
    assert not passes(as_float, hidden_tests(halving_and_sum))


def test_the_first_hidden_test_is_the_empty_list_and_there_are_num_tests() -> None:
    spec = Spec(0, 0, 0)
    problem = hidden_tests(spec)
    assert problem.tests[0] == CallTest(function="f", args=[[]], expected=0)
    assert len(problem.tests) == 8


def test_no_two_wordings_are_equal_and_those_of_a_spec_differ_in_every_phrase() -> None:
    train, held_out = list_functions.split()
    texts = [list_functions.wording(spec, which) for spec in train + held_out for which in (0, 1)]
    assert len(set(texts)) == len(texts) == 2 * 7600
    for spec in held_out:
        one, other = list_functions.wording(spec, 0), list_functions.wording(spec, 1)
        phrases = "|".join(
            sorted((p for c in spec.concepts for p in c.phrases), key=len, reverse=True)
        )
        assert re.sub(phrases, "", one) != re.sub(phrases, "", other), "another word order"
        for concept in spec.concepts:
            shown = [
                {phrase for phrase in concept.phrases if phrase in text} for text in (one, other)
            ]
            assert shown[0] | shown[1] == set(concept.phrases)


def test_the_corpus_never_shows_a_held_out_spec() -> None:
    train, held_out = list_functions.split()
    hidden = {list_functions.wording(spec, which) for spec in held_out for which in (0, 1)}
    pairs = itertools.islice(corpus.corpus(train, corpus.flaw_rates(0.3, 0.5), 0), 20_000)
    assert not hidden & {prompt for prompt, _ in pairs}


def test_flaw_rates_average_to_the_probability_in_every_slot() -> None:
    for rates, table in zip(corpus.flaw_rates(0.4, 0.5), (FILTERS, MAPS, REDUCTIONS), strict=True):
        assert len(rates) == len(table)
        assert sum(rates) / len(rates) == pytest.approx(0.4)
        assert [min(rates), max(rates)] == pytest.approx([0.2, 0.6])
    assert set(itertools.chain(*corpus.flaw_rates(0.4, 0.0))) == {0.4}


def test_each_concept_is_wrong_as_often_as_its_rate_says() -> None:
    spec = Spec(3, 4, 5)
    rates = corpus.flaw_rates(0.4, 0.5)
    rng = random.Random(0)
    programs = [corpus.flawed_program(spec, rates, rng) for _ in range(4000)]
    right = f"if {spec.concepts[0].code}]"
    assert sum(right not in text for text in programs) / 4000 == pytest.approx(
        rates[0][spec.filter], abs=0.03
    )


def test_flaws_differ_from_the_right_code_and_from_each_other() -> None:
    for concept in (*FILTERS, *MAPS, *REDUCTIONS):
        assert len({concept.code, *concept.flaws}) == 1 + len(concept.flaws)
        assert len(set(concept.phrases)) == 2


def test_a_share_of_the_corpus_retries_a_failed_program_in_the_form_of_the_retry_example() -> None:
    specs, _ = list_functions.split()
    rates = corpus.flaw_rates(0.4, 0.5)
    plain = list(itertools.islice(corpus.corpus(specs, rates, 0), 200))
    assert list(itertools.islice(corpus.corpus(specs, rates, 0, 0.0), 200)) == plain
    pairs = list(itertools.islice(corpus.corpus(specs, rates, 0, 0.5), 400))
    again = [prompt for prompt, _ in pairs if END in prompt]
    assert 150 < len(again) < 250
    for prompt in again:
        first, _, told = prompt.partition(END)
        asked = first.splitlines(keepends=True)[0]
        outcome, _, rest = told.removeprefix("# ").partition("\n")
        assert rest == asked
        assert ", not " in outcome
        assert told == second_prompt(outcome, asked)
