"""Log-probs of answers that were drawn from a part of the vocabulary, recomputed from the weights
and the supports as the learner does it.
"""

from pathlib import Path
from types import SimpleNamespace
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
    replayed,
    run_scenario,
)

from async_rl.batching.support import Grammars, compile_grammar, edits_of
from async_rl.core.calls import Support
from async_rl.core.errors import ConfigError
from async_rl.core.types import Score, Trajectory
from async_rl.protocol.generator import Completion, Scores
from async_rl.rollouts.conversation import Written
from async_rl.rollouts.rollout import trajectory

TEMPERATURE = 0.7
TOLERANCE = 1e-4
Case = tuple[Path, Any, dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        "hf",
        pytest.param("vllm", marks=pytest.mark.slow),
        pytest.param("drafts", marks=pytest.mark.slow),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param) / "model"
    model = make_speaker(path)
    return path, model, run_scenario("support_scenario:main", request.param, path)


def sample_of(done: Completion) -> Trajectory:
    prompt: Any = SimpleNamespace(token_ids=np.array(SUPPORTED_PROMPT, np.int32))
    score = Score(reward=0.0, parts={}, verdicts=(), latency_s=0.0)
    return trajectory(prompt, Written(tokens=done, answer="", transcript=""), score)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_logprobs_are_those_of_the_support_and_of_the_likeliest_tokens(
    case: Case, kind: str
) -> None:
    path, model, said = case
    if kind not in said["drawn"]:
        pytest.skip("not possible next to drafts")
    grammars = Grammars(tokenizer=str(path), vocab_size=model.config.vocab_size)
    models = {version: model_of(model, version) for version in (0, 1)}
    before = SUPPORTED_PROMPT
    shown = said["shown"][kind]
    # The prompt was read without the support, by the version of the first token of some sample.
    reads = [
        replayed(models, before[:1], before[1:], [version] * (len(before) - 1), 1.0)
        for version in {int(done.versions[0]) for done in shown}
    ]
    for done in (*said["drawn"][kind], *shown):
        edits, is_outside = edits_of(
            [sample_of(done)], grammars, temperature=TEMPERATURE, device=torch.device("cpu")
        )
        assert not is_outside.any()
        ids, versions = done.token_ids.tolist(), done.versions.tolist()
        table = replayed(models, before, ids, versions, TEMPERATURE, edits, keeps_cache=False)
        own = Scores(ids=done.token_ids[:, None], logprobs=done.logprobs[:, None])
        assert difference(own, table, 1) < TOLERANCE
        if done.likeliest is None:
            # Without its support the answer would have other log-probs.
            whole = replayed(models, before, ids, versions, TEMPERATURE, keeps_cache=False)
            assert (kind == "all") == (difference(own, whole, 1) < TOLERANCE)
            continue
        assert difference(done.likeliest, table, 0) < TOLERANCE
        scores = done.prompt
        assert scores is not None
        assert np.isnan(scores.logprobs[0]).all()
        assert scores.ids[:, 0].tolist() == [0, *before[1:]]
        rest = Scores(ids=scores.ids[1:], logprobs=scores.logprobs[1:])
        assert min(difference(rest, read, 1) for read in reads) < TOLERANCE


def difference(scores: Scores, table: torch.Tensor, first: int) -> float:
    """Largest difference to the table, and of the columns from `first` on to its largest values;
    infinite if it has a token that the table excludes, or the reverse.
    """
    found = torch.tensor(scores.logprobs)
    expected = table.gather(-1, torch.tensor(scores.ids).long())
    is_possible = expected > -1000
    if not torch.equal(found > -torch.inf, is_possible):
        return float("inf")
    largest = table.topk(scores.ids.shape[1] - first).values
    gaps = torch.cat([found - expected, found[:, first:] - largest], 1)
    return float(gaps[torch.cat([is_possible, is_possible[:, first:]], 1)].abs().max())


def test_requests_span_the_push(case: Case) -> None:
    drawn = case[2]["drawn"]
    spanning = {
        kind
        for kind, samples in drawn.items()
        if any(set(done.versions.tolist()) == {0, 1} for done in samples)
    }
    has_drafts = "mixed" not in drawn
    assert spanning >= ({"all", "length"} if has_drafts else {"schema", "top_p", "mixed"})


def test_a_grammar_that_fails_with_the_tokens_stops_an_engine_at_its_start(tmp_path: Path) -> None:
    model = make_speaker(tmp_path)
    compile_grammar(Support(grammar=NEEDS_NO_TOKENS))
    grammars = Grammars(tokenizer=str(tmp_path), vocab_size=model.config.vocab_size)
    grammars.require(SUPPORTS.values())
    with pytest.raises(
        ConfigError, match=rf"^with the tokens of {tmp_path} the grammar .* refused"
    ):
        grammars.require([Support(grammar=NEEDS_NO_TOKENS)])


def test_what_cannot_be_drawn_is_refused_and_the_engine_lives(case: Case) -> None:
    said = case[2]
    # 100000 is out of the vocabulary.
    reasons = ("Type should be a string", "logit_bias", "the grammar '{", "100000")
    for text, reason in zip(said["refused"], reasons, strict=True):
        assert reason in text
    assert len(said["after"]) == 3
