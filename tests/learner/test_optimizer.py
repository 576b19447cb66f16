"""AdamW with its schedule and clipping equals a float64 loop written from the paper, for every
setting of it; moments in host memory give the same bits; steps may be scaled.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import (
    make_config,
    make_groups,
    make_trainer,
    offloading_trainer,
    optimizers_of,
    relative_difference,
    weights_of,
)
from tables import table
from torch import nn
from torch.distributed.tensor import DTensor

from async_rl.config.learner import OptimizerConfig
from async_rl.config.policy_losses import PluginStepScale, StepScale
from async_rl.core.errors import NonFiniteError
from async_rl.core.types import Group
from async_rl.learner import optimizer as optimizers
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.sharding import local
from async_rl.learner.trainer import Trainer

CPU = torch.device("cpu")
NUM_STEPS, ROUNDS = 12, 6
START = ("lr=0.05", "warmup_steps=2", "schedule=cosine", "min_lr_ratio=0.1")
BASE = (*START, "weight_decay=0.1", "betas=[0.9,0.95]", "eps=1e-3", "grad_clip=3")


def settings(*knobs: str) -> OptimizerConfig:
    return make_config(
        "grpo_code", *(f"learner.optimizer.{knob}" for knob in (*BASE, *knobs))
    ).learner.optimizer


def gradients() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)]
        for _ in range(ROUNDS)
    ]


def optimizer_of(config: OptimizerConfig) -> tuple[nn.Module, ModelOptimizer]:
    """Of a matrix and a vector."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, ModelOptimizer(
        "m", model, config, parameters=model.parameters(), num_steps=NUM_STEPS, is_offloaded=False
    )


def trained(config: OptimizerConfig) -> list[float]:
    """The numbers after some steps."""
    model, optimizer = optimizer_of(config)
    for step, grads in enumerate(gradients()):
        optimizer.set_step(step)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.apply(0.0)
    return [x for p in model.parameters() for x in p.detach().flatten().tolist()]


def oracle(config: OptimizerConfig) -> list[float]:
    """arXiv 1711.05101, algorithm 2, number by number; vectors do not decay."""
    torch.manual_seed(0)
    start = nn.Linear(4, 3)
    x = [v for p in start.parameters() for v in p.detach().flatten().tolist()]
    decays = [True] * 12 + [False] * 3
    m, v = [0.0] * 15, [0.0] * 15
    for step, grads in enumerate(gradients()):
        g = [value for grad in grads for value in grad.flatten().tolist()]
        norm = math.sqrt(sum(a * a for a in g))
        g = [a * min(1.0, config.grad_clip / norm) for a in g]
        lr = (
            config.lr * (step + 1) / config.warmup_steps
            if step < config.warmup_steps
            else config.lr
        )
        if step >= config.warmup_steps and config.schedule == "cosine":
            done = (step - config.warmup_steps) / (NUM_STEPS - config.warmup_steps)
            lr *= (
                config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2
            )
        first, second = config.betas
        for i in range(15):
            m[i] = first * m[i] + (1 - first) * g[i]
            v[i] = second * v[i] + (1 - second) * g[i] ** 2
            move = (m[i] / (1 - first ** (step + 1))) / (
                math.sqrt(v[i] / (1 - second ** (step + 1))) + config.eps
            )
            x[i] -= lr * (move + (config.weight_decay * x[i] if decays[i] else 0.0))
    return x


@pytest.mark.proves(
    "learner.optimizer.lr",
    "learner.optimizer.weight_decay",
    "learner.optimizer.betas",
    "learner.optimizer.eps",
    "learner.optimizer.warmup_steps",
    "learner.optimizer.min_lr_ratio",
    "learner.optimizer.schedule",
    "learner.optimizer.grad_clip",
)
@pytest.mark.covers("grad_clip", "lr_warmup_steps_ratio", "warmup_style, min_lr_ratio")
@pytest.mark.parametrize("knob", table(__file__, "every_setting_of_the_optimizer"))
def test_every_setting_of_the_optimizer_changes_what_is_trained_as_the_formula_says(
    knob: str,
) -> None:
    found = trained(settings(knob))
    assert found == pytest.approx(oracle(settings(knob)), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(found, trained(settings()), strict=True)) > 1e-3


@pytest.mark.proves("learner.optimizer.schedule_span")
def test_the_span_of_the_cosine_replaces_the_length_of_the_run() -> None:
    _, optimizer = optimizer_of(settings("min_lr_ratio=0", "schedule_span=[2,6]"))
    # Half of the cosine from step 2 to 6 is over at step 4; without a span at step 7.
    assert [optimizer.set_step(step) for step in (4, 6, 50)] == pytest.approx([0.025, 0.0, 0.0])


@pytest.mark.parametrize(
    ("value", "loss"), [(math.nan, 0.5), (math.inf, 0.5), (1e30, 0.5), (0.0, math.nan)]
)
def test_a_loss_or_gradients_that_are_not_finite_change_nothing(value: float, loss: float) -> None:
    """A float32 norm overflows at gradients above 1.8e19, so they count as infinite."""
    model, optimizer = optimizer_of(settings())
    parameters = list(model.parameters())
    for gradient in gradients():
        before = [p.detach().clone() for p in parameters]
        for parameter, grad in zip(parameters, gradient, strict=True):
            parameter.grad = grad.clone()
        broken = parameters[1].grad
        assert broken is not None
        broken.flatten()[1] = value
        with pytest.raises(NonFiniteError, match=r"m: loss (0\.5|nan), gradient norm"):
            optimizer.apply(loss)
        assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        moments = [x for state in optimizer.torch_optimizer.state.values() for x in state.values()]
        assert moments
        assert not any(x.any() for x in moments)
        assert all(parameter.grad is None for parameter in parameters)


SHAPES = [(7, 3), (5,), (4, 6), (1,), (3, 3), (9,)]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def parameters_on(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]


def offloading_optimizer(
    parameters: list[nn.Parameter], *, is_offloaded: bool, rule: StepScale | None = None
) -> ModelOptimizer:
    knobs = ("weight_decay=0.1", "grad_clip=0.5", "lr=0.1")
    return ModelOptimizer(
        "m",
        nn.ParameterList(parameters),
        make_config("grpo_code", *(f"learner.optimizer.{k}" for k in knobs)).learner.optimizer,
        parameters=parameters,
        num_steps=10,
        is_offloaded=is_offloaded,
        rule=rule,
    )


def make_step(optimizer: ModelOptimizer, parameters: list[nn.Parameter], seed: int) -> None:
    # Alike from step to step, so that the rule for repeated gradients applies.
    generator = torch.Generator().manual_seed(seed % 2)
    for parameter in parameters:
        gradient = 1 + 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.device)
    optimizer.set_step(seed)
    optimizer.apply(0.0)


def states(optimizer: ModelOptimizer) -> list[torch.Tensor]:
    of = optimizer.torch_optimizer.state
    return [
        of[p][name] for p in optimizer._parameters for name in ("step", "exp_avg", "exp_avg_sq")
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rule", [None, PluginStepScale(kind="plugin", fn="async_rl.examples.losses.gac:cut")]
)
@pytest.mark.parametrize("piece_bytes", [1, 8 * 30])
def test_pieces_give_the_bits_of_one_step_over_all_and_their_moments_stay_on_the_host(
    device: str, rule: StepScale | None, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "MOMENTS_PIECE_BYTES", piece_bytes)
    found = []
    for is_offloaded in (False, True):
        parameters = parameters_on(device)
        optimizer = offloading_optimizer(parameters, is_offloaded=is_offloaded, rule=rule)
        homes = [x.data_ptr() for x in states(optimizer)]
        for seed in range(4):
            make_step(optimizer, parameters, seed)
            assert not is_offloaded or [x.data_ptr() for x in states(optimizer)] == homes
        found.append([x.detach().cpu() for x in (*parameters, *states(optimizer))])
    kept = [x for x in states(optimizer) if x.ndim]
    assert all(x.device == CPU and x.is_pinned() == (device == "cuda") for x in kept)
    for resident, offloaded in zip(*found, strict=True):
        # The rule's inner products are sums over pieces.
        torch.testing.assert_close(
            offloaded, resident, rtol=1e-6 if rule else 0, atol=1e-7 if rule else 0
        )


def test_a_checkpoint_is_read_into_the_host_and_training_goes_on_bit_for_bit(
    model_path: Path, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "MOMENTS_PIECE_BYTES", 100_000)
    first, second = (
        offloading_trainer(model_path, "ppo_code", "model.dtype=bfloat16", offload="optimizer")
        for _ in range(2)
    )
    for version in range(2):
        first.step(make_groups(version, version=version), version)
    first.save(tmp_path / "step_2", 2).result()
    assert all(len(o.moments._pieces) > 1 for o in optimizers_of(second))
    kept = [x for o in optimizers_of(second) for x in states(o)]
    assert all(isinstance(x, DTensor) for x in kept if x.ndim)
    homes = [local(x).data_ptr() for x in kept]
    assert second.load(tmp_path / "step_2") == 2
    assert [local(x).data_ptr() for o in optimizers_of(second) for x in states(o)] == homes
    for trainer in (first, second):
        trainer.step(make_groups(2, version=2), 2)
    for one, other in zip(first.full_tensors(), second.full_tensors(), strict=True):
        assert torch.equal(one, other)


# Without momentum from a step before, AdamW's first step is the learning rate times a direction.
PLAIN = ("learner.optimizer.lr=1e-3", "learner.optimizer.schedule=constant")
SCALED = "algorithm.step_scale=effective_sequences"


def old_groups(scorer: Trainer) -> list[Group]:
    """Groups whose behavior log-probs are those of the model and some noise."""
    groups, rng = make_groups(), np.random.default_rng(1)
    for t in (t for g in groups for t in g.trajectories):
        near = scorer.logprobs([t.token_ids])[0] + rng.normal(scale=0.5, size=len(t.token_ids))
        t.behavior_logprobs[:] = np.where(t.loss_mask, near, 0)
    return groups


def effective_share(groups: list[Group], scorer: Trainer) -> float:
    """By the definition, one sequence at a time."""
    weights = []
    for t in (t for g in groups for t in g.trajectories):
        ratio = scorer.logprobs([t.token_ids])[0].astype(np.float64) - t.behavior_logprobs
        weights.append(math.exp(ratio[t.loss_mask].sum()))
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.proves("algorithm.step_scale")
def test_the_step_is_shorter_by_the_square_root_of_the_effective_share(model_path: Path) -> None:
    moved, scalars = [], []
    for knobs in ((), (SCALED,)):
        trainer = make_trainer(model_path, "grpo_code", *PLAIN, *knobs)
        groups = old_groups(trainer)
        share = effective_share(groups, trainer)
        before = weights_of(trainer)
        scalars.append(trainer.step(groups, 0).scalars)
        moved.append(relative_difference(weights_of(trainer), before))
    assert 0.05 < share < 0.8
    assert scalars[0]["policy/effective_sequences"] == pytest.approx(share, rel=1e-3)
    assert scalars[0]["policy/step_scale"] == 1.0
    assert scalars[1]["policy/step_scale"] == pytest.approx(share**0.5, rel=1e-3)
    assert moved[1] / moved[0] == pytest.approx(share**0.5, rel=1e-2)


@pytest.mark.proves("algorithm.step_scale", "algorithm.step_scale.fn")
def test_a_gradient_that_repeats_the_one_before_is_cut_to_the_bound(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With betas[0] = 0 the first moment is the gradient before, and the same batch at a tiny rate
    has nearly the same gradient again: only sqrt((1 - c^2) / (1 - bound^2)) of it is left.
    """
    knobs = ("learner.optimizer.betas=[0,0.95]", "learner.optimizer.lr=1e-6")
    kept = {}
    for bound in (0.1, 0.9, 1.0):
        monkeypatch.setattr("async_rl.examples.losses.gac.BOUND", bound)
        trainer = make_trainer(model_path, "grpo_code", "algorithm=gac", *PLAIN[1:], *knobs)
        groups = make_groups()
        assert trainer.step(groups, 0).scalars["policy/step_scale"] == 1.0
        kept[bound] = trainer.step(groups, 1).scalars["policy/step_scale"]
    assert kept[1.0] == 1.0
    assert kept[0.1] < 0.05
    assert kept[0.9] / kept[0.1] == pytest.approx((0.99 / 0.19) ** 0.5, rel=1e-2)
