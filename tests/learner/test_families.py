"""Models of other makers, small and random: packed rows give their own log-probs and gradients, or
the family is refused with the reason. The families are those of async_rl/planning/families.toml.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tables import table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from async_rl.batching.packing import pack_rows
from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.core.errors import ConfigError
from async_rl.data.model_files import model_problems
from async_rl.learner.loading import load_policy
from async_rl.learner.pretrained import PretrainedWeights
from async_rl.planning.shape import FAMILIES, refusal
from async_rl.weights.lora import merged_weights

SIZES = table(__file__, "sizes")
SETTINGS: dict[str, dict[str, Any]] = table(__file__, "settings")
LARGE = {"kimi_linear", "qwen3_5_moe_text", "nemotron_h"}
"""Refused families whose configurations have no small form with these sizes."""
MULTIMODAL = {"llama4", "qwen3_5", "qwen3_5_moe"}
"""Refused as their language model is."""
TRAINED, RENAMED, REFUSED = (FAMILIES[name] for name in ("trains", "renamed", "refused"))


def save(path: Path, kind: str) -> PreTrainedModel:
    """Write a random model whose log-probs depend on every token, and return it."""
    config_class = CONFIG_MAPPING[kind]
    known = {*config_class().to_dict(), *config_class.attribute_map}
    settings = {n: v for n, v in (SIZES | SETTINGS.get(kind, {})).items() if n in known}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            elif not parameter.any():
                parameter.normal_(std=0.1)
        # Logits of several nats show a cap or a scale of the output head.
        model.get_output_embeddings().weight.mul_(8)
    model.save_pretrained(path)
    return model


def own_logprobs(model: PreTrainedModel, row: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(row.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_family_that_trains_has_its_own_logprobs_gradients_and_names(
    tmp_path: Path, kind: str
) -> None:
    save(tmp_path, kind)
    policy = load_policy(tmp_path, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, 50, 5)
    rows = [np.concatenate([prompt, rng.integers(2, 50, n)]).astype(np.int32) for n in (2, 9, 14)]
    row = pack_rows(rows, prompt_length=len(prompt), device=torch.device("cpu"))
    assert row.input_ids.shape[1] == 5 + 1 + 8 + 13, "the prompt once, and no last token"
    packed = policy(row, temperature=1.0, chunk_tokens=7).logprobs
    own = torch.cat([own_logprobs(model, each)[len(prompt) - 1 :] for each in rows])
    torch.testing.assert_close(packed, own, atol=1e-4, rtol=0)
    packed.sum().backward()
    own.sum().backward()
    own_gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in own_gradients.values())
    for name, parameter in policy.lm.named_parameters():
        if name in own_gradients:
            expected = own_gradients[name]
            torch.testing.assert_close(parameter.grad, expected, atol=1e-5 * scale, rtol=1e-3)
    assert len(own_gradients) > 0.6 * len(list(model.parameters()))
    # vLLM reads the pushed tensors as it reads the files; experts may be packed
    # (tests/generation/test_engines.py), and buffers are never trained.
    with safe_open(tmp_path / "model.safetensors", framework="np") as weights:
        stored = set(weights.keys()) - {name for name, _ in policy.lm.named_buffers()}
    pushed = {name for name, _ in merged_weights(policy.lm)}
    others = {name for name in stored ^ pushed if ".mlp.experts." not in name}
    assert bool(others) == (kind in RENAMED), others
    # The plan of memory counts a model that is loaded whole by this list.
    is_whole = PretrainedWeights.open(tmp_path, trust_remote_code=False) is None
    assert is_whole == (kind in RENAMED)


@pytest.mark.parametrize("kind", sorted({*REFUSED, "gemma2", "vaultgemma"} - LARGE - MULTIMODAL))
def test_a_family_that_the_learner_cannot_compute_is_refused_before_a_run(
    tmp_path: Path, kind: str
) -> None:
    save(tmp_path, kind)
    with pytest.raises(ConfigError, match=r"packed rows: |attention or output head"):
        load_policy(tmp_path, trust_remote_code=False)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    config = compose_unchecked("grpo_code", [f"model.path={tmp_path}"]).model
    (problem,) = model_problems(config, tmp_path)
    assert problem.startswith(f"model.path={tmp_path}: the learner cannot train model_type={kind}:")
    assert list(model_problems(replace(config, trust_remote_code=True), tmp_path)) == []


@pytest.mark.parametrize(("fields", "reason"), table(__file__, "a_configuration_is_refused_by"))
def test_a_configuration_is_refused_by_its_type_and_its_fields(
    fields: dict[str, Any], reason: str
) -> None:
    found = refusal(fields)
    assert reason in found
    assert bool(found) == bool(reason)


def test_families_are_known_to_transformers_and_have_one_verdict() -> None:
    assert {*TRAINED, *REFUSED} <= {*CONFIG_MAPPING}
    assert {*TRAINED} & {*REFUSED} == set()
    assert len(TRAINED) >= 20
    assert {*RENAMED} <= {*TRAINED}
