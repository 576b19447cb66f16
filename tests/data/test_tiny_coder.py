"""The embedded model and its warm start, at a small size."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from data_support import SMALL_MODEL

from benchmarks.embedded import corpus, list_functions, tiny_coder
from benchmarks.embedded.tiny_coder import TINY_CODER


def pairs() -> Any:
    specs, _ = list_functions.split()
    return corpus.corpus(specs, corpus.flaw_rates(0.3, 0.5), 0)


def silent(fraction: float, text: str) -> None:
    pass


def test_batches_have_every_pair_once_with_labels_on_the_program_and_its_end(
    tokenizer: Any,
) -> None:
    drawn = sorted(prompt + answer for prompt, answer in itertools.islice(pairs(), 64))
    seen = []
    for ids, labels in itertools.islice(tiny_coder.batches(pairs(), tokenizer, 8), 8):
        assert ids.shape == labels.shape
        for row, wanted in zip(ids, labels, strict=True):
            answer = wanted[wanted != -100].tolist()
            start = int((wanted != -100).nonzero()[0])
            assert answer[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(answer[:-1]).startswith("def f(xs):\n")
            assert (row[start + len(answer) :] == tokenizer.pad_token_id).all()
            seen.append(tokenizer.decode(row[: start + len(answer) - 1].tolist()))
    assert sorted(seen) == drawn


def test_the_loss_is_the_cross_entropy_of_the_labelled_tokens(tokenizer: Any) -> None:
    model = tiny_coder.build_model(SMALL_MODEL, tokenizer)
    ids, labels = next(tiny_coder.batches(pairs(), tokenizer, 8))
    logprobs = torch.log_softmax(model(input_ids=ids).logits.detach(), dim=-1)
    picked = [
        -float(logprobs[row, t - 1, ids[row, t]])
        for row in range(8)
        for t in range(1, ids.shape[1])
        if int(labels[row, t]) != -100
    ]
    assert float(tiny_coder.supervised_loss(model, (ids, labels)).detach()) == pytest.approx(
        sum(picked), rel=1e-5
    )


def test_the_workers_together_give_the_gradient_of_the_mean_loss(tokenizer: Any) -> None:
    model = tiny_coder.build_model(SMALL_MODEL, tokenizer)
    batch = next(tiny_coder.batches(pairs(), tokenizer, 7))
    mean = tiny_coder.supervised_loss(model, batch) / (batch[1] != -100).sum()
    wanted = torch.autograd.grad(mean, list(model.parameters()))
    with ThreadPoolExecutor(2) as pool:
        loss = tiny_coder.accumulate_gradients(model, batch, pool)
    assert loss == pytest.approx(float(mean.detach()), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_every_parameter_has_exactly_one_optimizer(tokenizer: Any) -> None:
    model = tiny_coder.build_model(SMALL_MODEL, tokenizer)
    held = [
        id(p)
        for optimizer in tiny_coder.build_optimizers(model, 1e-3)
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [tiny_coder.learning_rate(step, num_steps=100, peak=1.0) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == rates[19] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.02)


def test_the_warm_start_lowers_the_loss_and_reports_every_step(tokenizer: Any) -> None:
    model = tiny_coder.build_model(SMALL_MODEL, tokenizer)
    fractions: list[float] = []
    losses = tiny_coder.warm_start(
        model,
        tiny_coder.batches(pairs(), tokenizer, 8),
        SMALL_MODEL,
        lambda fraction, text: fractions.append(fraction),
    )
    assert len(losses) == len(fractions) == 12
    assert fractions == sorted(fractions)
    assert losses[-1] < losses[0] - 0.3


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_random_state(
    tokenizer: Any, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        tiny_coder.make_tiny_coder(
            tmp_path / name, dataclasses.replace(SMALL_MODEL, seed=seed), silent
        )
    assert torch.equal(before, torch.random.get_rng_state())
    one, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again", "other")
    )
    assert one == again != other


def test_the_saved_directory_loads_as_any_hugging_face_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tiny_coder.make_tiny_coder(tmp_path, SMALL_MODEL, silent)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (
        GenerationConfig.from_pretrained(str(tmp_path)).eos_token_id
        == tokenizer.eos_token_id
        == model.config.eos_token_id
    )


def test_the_default_model_has_about_a_million_parameters(tokenizer: Any) -> None:
    model = tiny_coder.build_model(TINY_CODER, tokenizer)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
