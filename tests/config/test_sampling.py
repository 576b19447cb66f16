"""generation.sampling and evaluation.sampling: what samples may draw."""

import pytest
from composing import compose
from tables import table

from async_rl.config.sampling import sampling_of
from async_rl.core.calls import EVERYTHING, Support
from async_rl.core.types import Purpose


@pytest.mark.proves("generation.sampling", "evaluation.sampling")
@pytest.mark.covers("top_p, top_k, min_new_tokens")
def test_entries_limit_what_is_drawn_for_their_purpose() -> None:
    schema = '{"type": "object"}'
    train = "['top_k=50','top_p=0.9','min_tokens=4','logit_bias={\"7\":-2.5}']"
    held_out = f"evaluation.sampling=['top_p=0.5','grammar={schema}']"
    config = compose("grpo_code", [f"generation.sampling={train}", held_out])
    wanted = Support(top_k=50, top_p=0.9, min_tokens=4, logit_bias={7: -2.5})
    assert sampling_of(config, Purpose.TRAIN).support == wanted
    assert sampling_of(config, Purpose.EVAL).support == Support(top_p=0.5, grammar=schema)
    for purpose in Purpose:
        assert sampling_of(compose("grpo_code"), purpose).support == EVERYTHING


@pytest.mark.parametrize(("grammar", "kind"), table(__file__, "the_text_of_a_grammar"))
def test_the_text_of_a_grammar_shows_its_kind(grammar: str, kind: str) -> None:
    assert Support(grammar=grammar).grammar_kind == kind
