"""The embedded task: functions of a list of integers, as filter x map x reduction.

concepts.toml has the phrases, the code and the typical errors (flaws) of each filter, map and
reduction; it also says what its lines mean. A spec combines one of each; it has two wordings.
Invariants
- Everything follows from this file and concepts.toml: the same prompts in the same order.
- Both wordings of a spec are on the same side of the split; no text of a held-out spec is among the
  training prompts.
- The response is complete Python source that defines `f`; the hidden tests call it.
`python -m benchmarks.embedded.make` writes the task into the files that the product has of it.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from async_rl.core.frozen import Value
from async_rl.core.types import CallTest, CodeProblem

DATA_SOURCE = "list_functions"
FUNCTION = "f"
NUM_WORDINGS = 2
# Enough that two specs rarely draw the same tests; the lists of all specs are still computed in a
# moment.
_NUM_INPUTS = 64
_NUM_TESTS = 8
_HELD_OUT_SHARE = 0.1
"""The share of the specs that only evaluation uses."""


class Concept(Value, array_like=True):
    """One part of a spec: two phrases for it, its code, its flaws."""

    phrases: tuple[str, str]
    code: str
    flaws: tuple[str, ...]

    @property
    def run(self) -> Callable[[Any], Any]:
        """The code as a function of its variable."""
        return _FUNCTIONS[self.code]


class _Tables(Value):
    filters: tuple[Concept, ...]
    maps: tuple[Concept, ...]
    reductions: tuple[Concept, ...]
    templates: tuple[str, ...]


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "x % 2 == 0": lambda x: x % 2 == 0,
    "x % 2 == 1": lambda x: x % 2 == 1,
    "x > 0": lambda x: x > 0,
    "x < 0": lambda x: x < 0,
    "x > 3": lambda x: x > 3,
    "x >= 5": lambda x: x >= 5,
    "x < 4": lambda x: x < 4,
    "x <= 2": lambda x: x <= 2,
    "x % 3 == 0": lambda x: x % 3 == 0,
    "x % 3 != 0": lambda x: x % 3 != 0,
    "x % 3 == 1": lambda x: x % 3 == 1,
    "x % 4 == 0": lambda x: x % 4 == 0,
    "x != 0": lambda x: x != 0,
    "x != 6": lambda x: x != 6,
    "2 <= x <= 9": lambda x: 2 <= x <= 9,
    "abs(x) > 6": lambda x: abs(x) > 6,
    "abs(x) < 5": lambda x: abs(x) < 5,
    "x % 2 == 1 and x > 0": lambda x: x % 2 == 1 and x > 0,
    "x % 2 == 0 or x < 0": lambda x: x % 2 == 0 or x < 0,
    "x * 2": lambda x: x * 2,
    "x * 3": lambda x: x * 3,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "-x": lambda x: -x,
    "abs(x)": abs,
    "x + 1": lambda x: x + 1,
    "x - 1": lambda x: x - 1,
    "x + 5": lambda x: x + 5,
    "x - 4": lambda x: x - 4,
    "10 - x": lambda x: 10 - x,
    "x // 2": lambda x: x // 2,
    "x // 3": lambda x: x // 3,
    "x % 3": lambda x: x % 3,
    "x % 7": lambda x: x % 7,
    "x * 2 + 1": lambda x: x * 2 + 1,
    "x ** 2 - 1": lambda x: x**2 - 1,
    "abs(x - 7)": lambda x: abs(x - 7),
    "max(x, 0)": lambda x: max(x, 0),
    "min(x, 8)": lambda x: min(x, 8),
    "sum(ys)": sum,
    "sum(ys) * 2": lambda ys: sum(ys) * 2,
    "sum(ys) % 10": lambda ys: sum(ys) % 10,
    "-sum(ys)": lambda ys: -sum(ys),
    "sum(y * y for y in ys)": lambda ys: sum(y * y for y in ys),
    "max(ys, default=0)": lambda ys: max(ys, default=0),
    "min(ys, default=0)": lambda ys: min(ys, default=0),
    "len(set(ys))": lambda ys: len(set(ys)),
    "sum(y > 4 for y in ys)": lambda ys: sum(y > 4 for y in ys),
    "ys[0] if ys else 0": lambda ys: ys[0] if ys else 0,
    "ys[-1] if ys else 0": lambda ys: ys[-1] if ys else 0,
    "ys[:3]": lambda ys: ys[:3],
    "ys[-2:]": lambda ys: ys[-2:],
    "ys[1:]": lambda ys: ys[1:],
    "ys[:-1]": lambda ys: ys[:-1],
    "ys[::2]": lambda ys: ys[::2],
    "ys[::-1]": lambda ys: ys[::-1],
    "sorted(ys)": sorted,
    "sorted(ys)[::-1]": lambda ys: sorted(ys)[::-1],
    "sorted(set(ys))": lambda ys: sorted(set(ys)),
}
"""Each code as a function of `x` or `ys`. Written out, because nothing outside the jail evaluates
text; a test compares them with the code.
"""

_TABLES = msgspec.toml.decode(Path(__file__).with_name("concepts.toml").read_bytes(), type=_Tables)
FILTERS = _TABLES.filters
MAPS = _TABLES.maps
REDUCTIONS = _TABLES.reductions
TEMPLATES = _TABLES.templates

PROGRAM = "def f(xs):\n    ys = [{map} for x in xs if {filter}]\n    return {reduction}"
"""The form of a solution in the corpus: complete source of `f`, which runs as it is."""


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


def split() -> tuple[list[Spec], list[Spec]]:
    """(training specs, held-out specs), each in a random order, so that any prefix is a fair
    sample.
    """
    specs = [
        Spec(f, m, r)
        for f in range(len(FILTERS))
        for m in range(len(MAPS))
        for r in range(len(REDUCTIONS))
    ]
    random.Random("split-0").shuffle(specs)
    num_held_out = round(len(specs) * _HELD_OUT_SHARE)
    return specs[num_held_out:], specs[:num_held_out]


def random_list(rng: random.Random) -> list[int]:
    """Return an input of the task's functions."""
    return [rng.randint(-12, 15) for _ in range(rng.randint(5, 11))]


@functools.cache
def _inputs() -> list[list[int]]:
    rng = random.Random("inputs-0")
    return [random_list(rng) for _ in range(_NUM_INPUTS)]


@functools.cache
def _mapped(keep: Concept, change: Concept) -> list[list[int]]:
    return [[change.run(x) for x in xs if keep.run(x)] for xs in _inputs()]


def hidden_tests(spec: Spec) -> CodeProblem:
    """Return the hidden side of a spec: calls of `f` with the values that it must return. The first
    input is the empty list; all others are drawn from a common pool.

    The pool is common because the filtered and mapped lists are then computed once for all
    reductions, which keeps preparing fast.
    """
    keep, change, reduction = spec.concepts
    # By name: the tests of a spec must not depend on which specs were made before.
    drawn = random.Random(f"tests-0-{spec.name}").sample(range(_NUM_INPUTS), _NUM_TESTS - 1)
    values = _mapped(keep, change)
    # The empty list first: it is where most wrong reductions fail.
    calls = [([], []), *((_inputs()[i], values[i]) for i in drawn)]
    return CodeProblem(
        tests=[
            CallTest(function=FUNCTION, args=[xs], expected=reduction.run(ys)) for xs, ys in calls
        ]
    )


def rows(specs: Sequence[Spec]) -> list[dict[str, Any]]:
    """Return each spec once with one of its wordings, in turn, then each with the other, as rows of
    a data file, in the product's own layout.
    """
    return [
        {
            "id": f"{spec.name}/{which}",
            "prompt": wording(spec, which).strip(),
            "tests": msgspec.json.encode(hidden_tests(spec).tests).decode(),
            "data_source": DATA_SOURCE,
            "solution": spec.solution(),
        }
        for turn in range(NUM_WORDINGS)
        for number, spec in enumerate(specs)
        for which in [(number + turn) % NUM_WORDINGS]
    ]
