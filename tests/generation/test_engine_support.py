"""Log-probs of answers that were drawn from a part of the vocabulary, recomputed from the weights
and the supports as the learner does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation_support import (
    NEEDS_NO_TOKENS,
    SUPPORTED_PROMPT,
    SUPPORTS,
    make_speaker,
    model_of,
    replay,
    replayed,
    run_scenario,
)
from transformers import Qwen3ForCausalLM

from async_rl.batching.support import Grammars, compile_grammar, edits_of
from async_rl.core.codec import decode
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import Value
from async_rl.core.support import Support
from async_rl.core.types import Score, Trajectory
from async_rl.protocol.generator import Completion, Scores
from async_rl.rollouts.conversation import Written
from async_rl.rollouts.rollout import trajectory

TEMPERATURE = 0.7
TOLERANCE = 1e-4


class Said(Value):
    drawn: dict[str, list[Completion]]
    shown: dict[str, list[Completion]]
    refused: list[str]
    after: list[Completion]
    proposed: list[list[int]]


@pytest.fixture(
    scope="module",
    params=[
        "hf",
        pytest.param("vllm", marks=pytest.mark.slow),
        pytest.param("drafts", marks=pytest.mark.slow),
    ],
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Qwen3ForCausalLM, Said]:
    path = tmp_path_factory.mktemp(request.param) / "model"
    model = make_speaker(path)
    out = path.with_name("said")
    run_scenario("support_scenario.py", request.param, path, out=out)
    return path, model, decode(out.read_bytes(), Said)


def sample_of(done: Completion) -> Trajectory:
    prompt: Any = type("P", (), {"token_ids": np.array(SUPPORTED_PROMPT, np.int32)})
    score = Score(reward=0.0, parts={}, verdicts=(), latency_s=0.0)
    return trajectory(prompt, Written(tokens=done, answer="", transcript=""), score)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_logprobs_are_those_of_the_support(
    case: tuple[Path, Qwen3ForCausalLM, Said], kind: str
) -> None:
    path, model, said = case
    if kind not in said.drawn:
        pytest.skip("not possible next to drafts")
    grammars = Grammars(tokenizer=str(path), vocab_size=model.config.vocab_size)
    models = {version: model_of(model, version) for version in (0, 1)}
    worst = 0.0
    for done in said.drawn[kind]:
        edits, is_outside = edits_of(
            [sample_of(done)], grammars, temperature=TEMPERATURE, device=torch.device("cpu")
        )
        assert not is_outside.any()
        ids, versions = done.token_ids.tolist(), done.versions.tolist()
        expected = replay(models, SUPPORTED_PROMPT, ids, versions, TEMPERATURE, edits)
        worst = max(worst, float(np.abs(expected - done.logprobs).max()))
        whole = replay(models, SUPPORTED_PROMPT, ids, versions, TEMPERATURE)
        # Without its support the answer would have other log-probs.
        assert (kind == "all") == (np.abs(whole - done.logprobs).max() < TOLERANCE)
    assert worst < TOLERANCE


@pytest.mark.parametrize("kind", SUPPORTS)
def test_alternatives_are_the_likeliest_tokens_of_answer_and_prompt(
    case: tuple[Path, Qwen3ForCausalLM, Said], kind: str
) -> None:
    path, model, said = case
    if kind not in said.shown:
        pytest.skip("not possible next to drafts")
    grammars = Grammars(tokenizer=str(path), vocab_size=model.config.vocab_size)
    models = {version: model_of(model, version) for version in (0, 1)}
    before = SUPPORTED_PROMPT
    for done in said.shown[kind]:
        edits, is_outside = edits_of(
            [sample_of(done)], grammars, temperature=TEMPERATURE, device=torch.device("cpu")
        )
        assert not is_outside.any()
        ids, versions = done.token_ids.tolist(), done.versions.tolist()
        table = replayed(models, before, ids, versions, TEMPERATURE, edits)
        require_likeliest(done.likeliest, table, 0)
        assert (
            np.abs(replay(models, before, ids, versions, TEMPERATURE, edits) - done.logprobs).max()
            < TOLERANCE
        )
        scores = done.prompt
        assert scores is not None
        assert np.isnan(scores.logprobs[0]).all()
        assert scores.ids[:, 0].tolist() == [0, *before[1:]]
        # The prompt was read by the first token's version, without the support.
        whole = replayed(models, before[:1], before[1:], versions[:1] * (len(before) - 1), 1.0)
        require_likeliest(Scores(ids=scores.ids[1:], logprobs=scores.logprobs[1:]), whole, 1)


def require_likeliest(scores: Scores | None, table: torch.Tensor, first: int) -> None:
    """Require the log-probs of the table, and after `first` columns its largest ones."""
    assert scores is not None
    found = torch.tensor(scores.logprobs)
    expected = table.gather(-1, torch.tensor(scores.ids).long())
    is_possible = expected > -1000
    assert ((found > -torch.inf) == is_possible).all()
    assert (found - expected)[is_possible].abs().max() < TOLERANCE
    largest = table.topk(scores.ids.shape[1] - first).values
    assert (found[:, first:] - largest)[is_possible[:, first:]].abs().max() < TOLERANCE


def test_requests_span_the_push(case: tuple[Path, Qwen3ForCausalLM, Said]) -> None:
    spanning = {
        kind
        for kind, samples in case[2].drawn.items()
        if any(set(done.versions.tolist()) == {0, 1} for done in samples)
    }
    has_drafts = "bias" not in case[2].drawn
    assert spanning >= ({"all", "length"} if has_drafts else {"bias", "schema", "top_k", "mixed"})


def test_the_longest_match_in_earlier_responses_or_the_row_is_proposed(
    case: tuple[Path, Qwen3ForCausalLM, Said],
) -> None:
    if case[2].proposed:
        assert case[2].proposed == [[7, 8, 9], [], [30, 31, 5], [7, 8, 9], [30, 40, 5], [7]]


def test_a_grammar_that_fails_with_the_tokens_stops_an_engine_at_its_start(tmp_path: Path) -> None:
    model = make_speaker(tmp_path)
    compile_grammar(Support(grammar=NEEDS_NO_TOKENS))
    grammars = Grammars(tokenizer=str(tmp_path), vocab_size=model.config.vocab_size)
    grammars.require(SUPPORTS.values())
    with pytest.raises(
        ConfigError, match=rf"^with the tokens of {tmp_path} the grammar .* refused"
    ):
        grammars.require([Support(grammar=NEEDS_NO_TOKENS)])


def test_what_cannot_be_drawn_is_refused_and_the_engine_lives(
    case: tuple[Path, Qwen3ForCausalLM, Said],
) -> None:
    said = case[2]
    assert "Type should be a string" in said.refused[0]
    assert "logit_bias" in said.refused[1]
    assert "the grammar '{" in said.refused[2]
    # Out of the vocabulary.
    assert "100000" in said.refused[3]
    # An error of the project is not the request's fault.
    assert said.refused[4] == "ValueError: ours"
    assert len(said.after) == 6
