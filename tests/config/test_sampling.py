"""generation.sampling and evaluation.sampling: what samples may draw."""

import pytest
from composing import compose
from tables import table

from async_rl.config.sampling import sampling_of
from async_rl.core.calls import EVERYTHING, Support
from async_rl.core.errors import ConfigError
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


@pytest.mark.parametrize(("override", "reason"), table(__file__, "what_cannot_be_sampled_is"))
def test_what_cannot_be_sampled_is_refused_before_a_run_starts(override: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("grpo_code", [override])
    (line,) = str(caught.value).splitlines()
    assert reason in line
    assert line.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    ("purpose", "entry"), [("generation", "top_k=20"), ("evaluation", 'logit_bias={"7":1}')]
)
def test_what_vllm_does_not_apply_to_drafts_is_refused_beside_them(
    purpose: str, entry: str
) -> None:
    drafts = """generation.vllm.extra=['speculative_config={"method":"ngram"}']"""
    limit = f"{purpose}.sampling=['{entry}']"
    compose("grpo_code", [drafts, f"{purpose}.sampling=['min_tokens=2']"])
    compose("grpo_code", ["generation.engine=hf", limit])
    with pytest.raises(ConfigError, match=rf"^{purpose}\.sampling=.* to drafts; remove them"):
        compose("grpo_code", [drafts, limit])


@pytest.mark.parametrize(("grammar", "kind"), table(__file__, "the_text_of_a_grammar"))
def test_the_text_of_a_grammar_shows_its_kind(grammar: str, kind: str) -> None:
    assert Support(grammar=grammar).grammar_kind == kind
