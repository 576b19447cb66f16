"""The flawed corpus of the embedded task: the programs on which the embedded model is warm-started.

Invariants: same settings and seed, same corpus; it contains no text of a spec that it is not given.
Only the preparation of the model needs it; the task itself is list_functions.py.
"""

import random
from collections.abc import Iterator, Sequence

from async_rl.examples.run_and_retry import second_prompt
from benchmarks.embedded.list_functions import (
    FILTERS,
    MAPS,
    NUM_WORDINGS,
    PROGRAM,
    REDUCTIONS,
    TEMPLATES,
    Spec,
    program,
    random_list,
    wording,
)
from benchmarks.embedded.vocabulary import END

_SLOTS = (FILTERS, MAPS, REDUCTIONS)


def flaw_rates(flaw_probability: float, flaw_spread: float) -> tuple[tuple[float, ...], ...]:
    """Return how often the corpus gets each filter, map and reduction wrong.

    Within each table the rates are evenly spaced over flaw_probability * (1 -+ flaw_spread), in an
    order fixed once, so that their
    mean is flaw_probability: some concepts are nearly right from the start, some are more often
    wrong than right.
    """
    rates = []
    for slot, table in enumerate(_SLOTS):
        ranks = list(range(len(table)))
        # Shuffled: neighbours in the tables are similar, and their rates should differ.
        random.Random(f"flaw-rates-{slot}").shuffle(ranks)
        offsets = [2 * rank / (len(table) - 1) - 1 for rank in ranks]
        rates.append(
            tuple(min(flaw_probability * (1 + flaw_spread * offset), 1.0) for offset in offsets)
        )
    return tuple(rates)


def flawed_program(spec: Spec, rates: Sequence[Sequence[float]], rng: random.Random) -> str:
    """A solution of `spec`; each concept is wrong with its rate; which of its flaws is
    drawn evenly.
    """
    parts = []
    for slot, (index, concept) in enumerate(
        zip((spec.filter, spec.map, spec.reduction), spec.concepts, strict=True)
    ):
        # Per concept, not per program: most programs of the start model are then partly right.
        is_flawed = rng.random() < rates[slot][index]
        parts.append(rng.choice(concept.flaws) if is_flawed else concept.code)
    return program(*parts)


def corpus(
    specs: Sequence[Spec], rates: Sequence[Sequence[float]], seed: int, retry_share: float = 0.0
) -> Iterator[tuple[str, str]]:
    """Endless (prompt, program) pairs for the warm start, over all wordings of `specs`, in random
    order.

    retry_share: share of prompts that contain a first program, END, its outcome and the prompt
    again, as in examples/run_and_retry.py.
    """
    rng = random.Random(f"corpus-{seed}")
    while True:
        spec = specs[rng.randrange(len(specs))]
        prompt = wording(spec, rng.randrange(NUM_WORDINGS))
        answer = flawed_program(spec, rates, rng)
        # No draw without retries, which the corpus of the plain model does not depend on.
        if retry_share and rng.random() < retry_share:
            first = flawed_program(spec, rates, rng)
            prompt += f"{first}{END}{second_prompt(_outcome(spec, specs, rng), prompt)}"
        yield prompt, answer


def _outcome(spec: Spec, specs: Sequence[Spec], rng: random.Random) -> str:
    """The value of another program than the requested one, and the expected value."""
    xs = random_list(rng)
    return f"{specs[rng.randrange(len(specs))].run(xs)!r}, not {spec.run(xs)!r}"


def vocabulary_text() -> Iterator[str]:
    """Every phrase, template and piece of code once: the text on which the tokenizer is trained."""
    for template in TEMPLATES:
        yield template.format(filter="", map="", reduction="") + "\n"
    for table, slot in zip(_SLOTS, ("filter", "map", "reduction"), strict=True):
        for concept in table:
            for phrase in concept.phrases:
                yield from (
                    template.format(**{"filter": "", "map": "", "reduction": "", slot: phrase})
                    for template in TEMPLATES
                )
            for code in (concept.code, *concept.flaws):
                yield PROGRAM.format(**{"filter": "x", "map": "x", "reduction": "ys", slot: code})
