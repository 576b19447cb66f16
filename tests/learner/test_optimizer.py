"""AdamW with its schedule and clipping equals a float64 loop written from the paper, for every
setting of it.
"""

import math

import pytest
import torch
from learner_support import make_config
from tables import table
from torch import nn

from async_rl.config.learner import OptimizerConfig
from async_rl.core.errors import NonFiniteError
from async_rl.learner.optimizer import ModelOptimizer

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
