"""LoRA in the learner against full weights, an explicit W + B A, and PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import (
    make_groups,
    make_trainer,
    policy_of,
    relative_difference,
    spy_on_gradients,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM

from async_rl.core.errors import ConfigError
from async_rl.learner.trainer import Trainer
from async_rl.weights.lora import adapter_weights

LORA = ("model.lora=lora", "model.lora.rank=4", "model.lora.alpha=8")
KL = ("algorithm.kl=loss", "algorithm.kl.coef=0.1")


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in trainer.tensor_specs()]
    return {n: t.clone() for n, t in zip(names, trainer.full_tensors(), strict=True)}


def adapter_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in adapter_weights(policy_of(trainer).lm)}


def stepped(model_path: Path, *overrides: str, steps: int = 2) -> Trainer:
    given = {text.partition("=")[0] for text in overrides}
    lora = [text for text in LORA if text.partition("=")[0] not in given]
    trainer = make_trainer(model_path, "grpo_code", *lora, *overrides)
    for version in range(steps):
        trainer.step(make_groups(seed=version, version=version), version)
    return trainer


def test_an_adapter_begins_as_the_model_then_differs_and_is_handed_out_as_a_copy(
    model_path: Path,
) -> None:
    full = make_trainer(model_path, "grpo_code")
    assert full.adapter() is None
    trainer = stepped(model_path, steps=0)
    before, handed = weights_of(trainer), trainer.adapter()
    assert handed is not None
    assert handed.scaling == 2.0
    copies = {name: tensor.clone() for name, tensor in handed.tensors.items()}
    assert before.keys() == weights_of(full).keys()
    assert all(torch.equal(before[n], t) for n, t in weights_of(full).items())
    trainer.step(make_groups(), 0)
    changed = {n for n, t in weights_of(trainer).items() if not torch.equal(t, before[n])}
    # B is 0 at first, so every product of the two layers changes with the first step.
    assert changed == {n for n in before if n.endswith("_proj.weight")}
    assert all(torch.equal(handed.tensors[name], tensor) for name, tensor in copies.items())


def test_gradients_are_those_of_the_product_of_the_matrices(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With G the gradient of a whole weight W: dB = s G A^T and dA = s B^T G. The oracle is full
    training at the merged weights.
    """
    one_update = ["learner.minibatches=1", "learner.epochs=1"]
    trainer = make_trainer(model_path, "grpo_code", *LORA, *one_update)
    torch.manual_seed(1)
    for name, parameter in adapter_weights(policy_of(trainer).lm):
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    merged = model_path.parent / "merged"
    trainer.export_hf(merged)
    adapter = adapter_of(trainer)
    collected = spy_on_gradients(monkeypatch, is_stepping=False)
    trainer.step(make_groups(), 0)
    (found,) = collected["policy"]
    collected.clear()
    dense = make_trainer(merged, "grpo_code", *one_update)
    dense.step(make_groups(), 0)
    (of_weights,) = collected["policy"]
    names = [name for name, _ in policy_of(dense).lm.named_parameters()]
    gradients = dict(zip(names, of_weights, strict=True))
    expected = []
    for name in adapter:
        owner, _, kind = name.removesuffix(".weight").rpartition(".lora_")
        inner = owner.removeprefix("base_model.model.")
        weight = gradients[f"{inner}.weight"].double()
        a, b = (adapter[f"{owner}.lora_{k}.weight"].double() for k in "AB")
        expected.append(2.0 * (b.T @ weight if kind == "A" else weight @ a.T))
    assert relative_difference(found, expected) < 2e-6


def test_the_reference_is_the_model_without_adapter(model_path: Path, tmp_path: Path) -> None:
    """A second model as the reference gives the same KL; the policy has moved away from it."""
    trainer = stepped(model_path, *KL)
    trainer.export_hf(tmp_path / "merged")
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (model_path, tmp_path / "merged")
    )
    groups = make_groups(seed=5, version=2)
    kl, weights = [], []
    for t in (t for group in groups for t in group.trajectories):
        ids = torch.from_numpy(t.token_ids).long()
        with torch.no_grad():
            p, q = (m(ids[None]).logits[0, :-1].log_softmax(-1) for m in (merged, base))
        proximal = p.gather(1, ids[1:, None])[:, 0].numpy()
        is_response = t.loss_mask[1:]
        kl += (p.exp() * (p - q)).sum(-1)[torch.from_numpy(is_response)].tolist()
        weights += np.exp(proximal - t.behavior_logprobs[1:])[is_response].clip(max=5.0).tolist()
    expected = np.average(kl, weights=weights)
    result = trainer.step(groups, 2)
    assert result.scalars["policy/kl_reference"] == pytest.approx(expected, rel=1e-2)
    assert expected > 5e-6


def test_peft_reads_an_exported_adapter(model_path: Path, tmp_path: Path) -> None:
    trainer = stepped(model_path, "model.path=owner/name")
    trainer.export_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_path)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    row = np.arange(20, dtype=np.int32)
    with torch.no_grad():
        logits = with_adapter(torch.from_numpy(row).long()[None]).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, torch.arange(1, 20)[:, None])[:, 0]
    np.testing.assert_allclose(trainer.logprobs([row])[0][1:], logprobs, atol=1e-4)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 8)
    assert described["base_model_name_or_path"] == "owner/name"


@pytest.mark.proves("model.lora.rank", "model.lora.alpha", "model.lora.targets", "model.lora")
def test_each_setting_changes_the_adapter(model_path: Path) -> None:
    def names_and_sizes(*overrides: str) -> dict[str, tuple[int, ...]]:
        trainer = stepped(model_path, *overrides, steps=0)
        return {n: tuple(t.shape) for n, t in adapter_of(trainer).items()}

    plain = names_and_sizes()
    assert len(plain) == 2 * 2 * 7
    assert {min(shape) for shape in plain.values()} == {4}
    assert {min(s) for s in names_and_sizes("model.lora.rank=2").values()} == {2}
    few = names_and_sizes("model.lora.targets=[q_proj,down_proj]")
    assert {n.split(".")[-3] for n in few} == {"q_proj", "down_proj"}
    full = make_trainer(model_path, "grpo_code", "model.lora=none")
    assert adapter_of(full) == {}
    one, two = (stepped(model_path, f"model.lora.alpha={a}", steps=1) for a in (8, 16))
    assert any(not torch.equal(t, weights_of(two)[n]) for n, t in weights_of(one).items())


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            ("model.lora.targets=[q_proj,c_attn]",),
            r"no linear layer c_attn; it has down_proj, gate_proj",
        ),
        (("model.lora.rank=17",), r"rank=17: a matrix of k_proj has a side of 16"),
        (
            (*KL, "algorithm.kl.ref_ema_eta=0.1"),
            r"ref_ema_eta=0.1 with model.lora=lora: the reference",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    model_path: Path, knobs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stepped(model_path, *knobs, steps=0)
