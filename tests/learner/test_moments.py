"""Moments in host memory: the same bits, one piece at a time on the device."""

from pathlib import Path

import pytest
import torch
from learner_support import make_config, make_groups, offloading_trainer, optimizers_of
from torch import nn
from torch.distributed.tensor import DTensor

from async_rl.config.policy_losses import PluginStepScale, StepScale
from async_rl.learner import optimizer as optimizers
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.sharding import local

CPU = torch.device("cpu")
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


def optimizer_of(
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


def step(optimizer: ModelOptimizer, parameters: list[nn.Parameter], seed: int) -> None:
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
        optimizer = optimizer_of(parameters, is_offloaded=is_offloaded, rule=rule)
        homes = [x.data_ptr() for x in states(optimizer)]
        for seed in range(4):
            step(optimizer, parameters, seed)
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
