"""The losses of the API against formulas of their own, in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tables import table

from async_rl.core.errors import DataError
from async_rl.service.losses import HIGH, LOSSES, LOW, Example, Row, find_loss

LENGTHS = [5, 3, 7]


def made_up(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = sum(LENGTHS)
    made = {
        "p": -rng.uniform(0.1, 4, size),
        "weights": rng.normal(size=size),
        "logprobs": -rng.uniform(0.1, 4, size),
        "advantages": rng.normal(size=size),
        "sequence_ratio_mask": np.array([0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1.0]),
    }
    return {name: values.astype(np.float32) for name, values in made.items()}


def row_of(x: dict[str, np.ndarray]) -> Row:
    parts = {name: np.split(values, np.cumsum(LENGTHS)[:-1]) for name, values in x.items()}
    examples = [
        Example(
            index=index,
            tokens=np.zeros(size, np.int64),
            targets=np.zeros(size, np.int64),
            inputs={name: part[index] for name, part in parts.items()},
        )
        for index, size in enumerate(LENGTHS)
    ]
    nothing: Any = None
    return Row(examples=examples, packed=nothing, pair=torch.zeros(sum(LENGTHS)))


def oracle(name: str, x: dict[str, np.ndarray], config: dict[str, float]) -> tuple[float, list]:
    """The loss and its gradient with respect to p, token by token."""
    x = {field: values.astype(np.float64) for field, values in x.items()}
    total, gradient = 0.0, []
    starts = np.cumsum([0, *LENGTHS])
    for t in range(sum(LENGTHS)):
        p, q, advantage = float(x["p"][t]), float(x["logprobs"][t]), float(x["advantages"][t])
        ratio = math.exp(p - q)
        low, high = config.get(LOW, 0.0), config.get(HIGH, math.inf)
        if name == "gspo":
            datum = int(np.searchsorted(starts, t, side="right")) - 1
            inside = range(starts[datum], starts[datum + 1])
            marked = [s for s in inside if x["sequence_ratio_mask"][s]]
            ratio = math.prod(math.exp(x["p"][s] - x["logprobs"][s]) for s in marked)
            ratio **= 1 / len(marked)
        if name == "cross_entropy":
            loss, slope = -p * x["weights"][t], -x["weights"][t]
        elif name == "importance_sampling":
            loss = slope = -ratio * advantage
        elif name in ("ppo", "gspo"):
            bounded = min(max(ratio, low), high)
            loss = -min(ratio * advantage, bounded * advantage)
            is_free = ratio * advantage <= bounded * advantage
            slope = -ratio * advantage if is_free else 0.0
        elif name == "cispo":
            factor = min(max(ratio, low), high) * advantage
            loss, slope = -factor * p, -factor
        else:
            loss = -(p * advantage - config["beta"] / 2 * (p - q) ** 2)
            slope = -advantage + config["beta"] * (p - q)
        total += loss
        gradient.append(slope)
    return total, gradient


@pytest.mark.parametrize(("name", "given"), table(__file__, "cases"))
def test_loss_and_gradient_are_those_of_the_formula(name: str, given: dict[str, float]) -> None:
    x = made_up()
    loss, config = find_loss(name, given)
    constants = {field: np.full(sum(LENGTHS), value) for field, value in config.items()}
    p = torch.tensor(x["p"], requires_grad=True)
    total = loss.compute(p, row_of(x | constants)).sum()
    total.backward()
    expected, gradient = oracle(name, x, config)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-12)
    assert p.grad is not None
    np.testing.assert_allclose(p.grad.numpy(), gradient, rtol=1e-7)


def test_each_token_may_have_bounds_of_its_own() -> None:
    x = made_up(1)
    lows, highs = np.linspace([0.1, 1.0], [0.9, 3.0], sum(LENGTHS)).T
    found = LOSSES["ppo"].compute(torch.tensor(x["p"]), row_of(x | {LOW: lows, HIGH: highs}))
    ratio = np.exp(x["p"] - x["logprobs"])
    both = ratio * x["advantages"], np.clip(ratio, lows, highs) * x["advantages"]
    np.testing.assert_allclose(found.numpy(), -np.minimum(*both), rtol=1e-6)


def test_thresholds_have_the_defaults_of_the_api() -> None:
    assert find_loss("ppo", {})[1] == {LOW: 0.8, HIGH: 1.2}
    assert find_loss("cispo", {HIGH: 5.0})[1] == {LOW: 0.0, HIGH: 5.0}


@pytest.mark.parametrize(("name", "config", "reason"), table(__file__, "refused"))
def test_a_loss_that_is_not_known_is_refused(name: str, config: dict, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        find_loss(name, config)
