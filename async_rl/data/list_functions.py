"""The embedded task: specs (filter x map x reduction over a list of integers), their split,
prompts and hidden tests.

Invariants
- Everything follows from `ListFunctions.seed`: same settings, same prompts in the same order.
- Both wordings of a spec are on the same side of the split; no text of a held-out spec is among the
  training prompts.
- The response is complete Python source that defines `f`; the hidden tests call it.
Pure Python, so that importing it costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.core.types import CallTest, CodeProblem
from async_rl.data.concepts import FILTERS, MAPS, PROGRAM, REDUCTIONS, TEMPLATES, Concept
from async_rl.data.embedded import ListFunctions

DATA_SOURCE = "list_functions"
FUNCTION = "f"
NUM_WORDINGS = 2
# Enough that two specs rarely draw the same tests; the lists of all specs are still computed in a
# moment.
_NUM_INPUTS = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """One task: positions in FILTERS, MAPS and REDUCTIONS."""

    filter: int
    map: int
    reduction: int

    @property
    def name(self) -> str:
        """Stable identifier, part of the prompt's id."""
        return f"{self.filter}-{self.map}-{self.reduction}"

    @property
    def concepts(self) -> tuple[Concept, Concept, Concept]:
        """Filter, map, reduction."""
        return FILTERS[self.filter], MAPS[self.map], REDUCTIONS[self.reduction]

    def solution(self) -> str:
        """Reference source of the function."""
        return program(*(concept.code for concept in self.concepts))

    def run(self, xs: Sequence[int]) -> Any:
        """The value of the reference solution for `xs`."""
        keep, change, reduce = (concept.run for concept in self.concepts)
        return reduce([change(x) for x in xs if keep(x)])


def program(filter_code: str, map_code: str, reduction_code: str) -> str:
    """Source of `f` from its three parts."""
    return PROGRAM.format(filter=filter_code, map=map_code, reduction=reduction_code)


def wording(spec: Spec, which: int) -> str:
    """The prompt's text: the `which`-th of the two wordings of `spec`, one line with its newline.

    The other wording has the other phrase of every concept and another word order; which is which
    differs between specs.
    """
    # From the name, not from a running generator: the wording of a spec must not depend on which
    # other specs were made before.
    mix = random.Random(spec.name).getrandbits(8)
    filter_, map_, reduction = (
        concept.phrases[(mix >> slot & 1) ^ which] for slot, concept in enumerate(spec.concepts)
    )
    # 1 to 3 templates further, so the second wording always has another one.
    distance = which * (1 + (mix >> 5) % 3)
    template = TEMPLATES[((mix >> 3) + distance) % len(TEMPLATES)]
    return template.format(filter=filter_, map=map_, reduction=reduction) + "\n"


def second_prompt(outcome: str, prompt: str) -> str:
    """The prompt after a program that failed, in rollouts of two turns: its outcome, and the prompt
    again.
    """
    return f"# {outcome}\n{prompt}"


def split(config: ListFunctions) -> tuple[list[Spec], list[Spec]]:
    """(training specs, held-out specs), each in a random order, so that any prefix is a fair
    sample.
    """
    specs = [
        Spec(f, m, r)
        for f in range(len(FILTERS))
        for m in range(len(MAPS))
        for r in range(len(REDUCTIONS))
    ]
    random.Random(f"split-{config.seed}").shuffle(specs)
    # At least one on each side, whatever the fraction is.
    num_held_out = min(max(round(len(specs) * config.held_out_fraction), 1), len(specs) - 1)
    return specs[num_held_out:], specs[:num_held_out]


class HiddenTests:
    """Makes the tests of a spec; the first one is the empty list, all other inputs are drawn from a
    common pool of inputs.

    The pool is common because the filtered and mapped lists are then computed once for all
    reductions, which keeps loading fast.
    """

    def __init__(self, config: ListFunctions) -> None:
        self._num_tests = config.num_tests
        self._seed = config.seed
        rng = random.Random(f"inputs-{config.seed}")
        self._inputs = [
            [rng.randint(-12, 15) for _ in range(rng.randint(5, 11))]
            for _ in range(max(_NUM_INPUTS, config.num_tests))
        ]
        self._mapped: dict[tuple[int, int], list[list[int]]] = {}

    def __call__(self, spec: Spec) -> CodeProblem:
        """The hidden side of `spec`: calls of `f` with the values that it must return."""
        keep, change, reduce = (concept.run for concept in spec.concepts)
        mapped = self._mapped.get((spec.filter, spec.map))
        if mapped is None:
            mapped = [[change(x) for x in xs if keep(x)] for xs in self._inputs]
            self._mapped[spec.filter, spec.map] = mapped
        drawn = random.Random(f"tests-{self._seed}-{spec.name}").sample(
            range(len(self._inputs)), self._num_tests - 1
        )
        # The empty list first: it is where most wrong reductions fail.
        tests = [CallTest(function=FUNCTION, args=[[]], expected=reduce([]))]
        tests += [
            CallTest(function=FUNCTION, args=[self._inputs[i]], expected=reduce(mapped[i]))
            for i in drawn
        ]
        return CodeProblem(tests=list(tests))
