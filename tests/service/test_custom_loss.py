"""Custom losses: the graphs that the real client makes, against its own computation of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_service_losses import LENGTHS, made_up, row_of

from async_rl.core.errors import DataError
from async_rl.service import custom
from async_rl.service.custom import custom_loss
from async_rl.service.forms import read_graph

client = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
Metrics = dict[str, torch.Tensor]


def clipped(logprobs: Any, advantages: Any, old: Any) -> tuple[Any, Metrics]:
    ratio = (logprobs - old).exp()
    bounded = torch.clamp(ratio, 0.8, 1.2) * advantages
    loss = -torch.minimum(ratio * advantages, bounded).sum() / logprobs.shape[0]
    share = (ratio > 1.2).float().mean()
    return loss, {"custom/clipped:mean": share, "custom/ratio:sum": ratio.detach().sum()}


def of_sequence(logprobs: Any, advantages: Any, old: Any) -> tuple[Any, Metrics]:
    gap = torch.where(advantages > 0, logprobs - old, torch.zeros_like(logprobs))
    total = F.softplus(-gap[1:]).mean() + F.logsigmoid(gap.cumsum(0)[..., -1])
    return total + torch.logsumexp(torch.stack([gap, 2 * gap]), dim=0).max(), {}


def nothing(logprobs: Any, advantages: Any, old: Any) -> tuple[Any, Metrics]:
    return (advantages * old).pow(2).sum().to(torch.float32), {}


RANKS = {"logprobs": 1, "advantages": 1, "old": 1}


def body(function: Callable[..., Any]) -> tuple[bytes, Any]:
    handle = client.trace_loss(function, RANKS, "s")
    form = {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": handle.name,
        "inputs": [it.model_dump() for it in handle.inputs],
        "graph": client.encode_graph(handle).model_dump(),
    }
    return msgspec.json.encode(form), handle.graph


@pytest.mark.parametrize("function", [clipped, of_sequence, nothing])
def test_a_graph_gives_loss_gradient_and_metrics_of_the_client(function: Any) -> None:
    content, graph = body(function)
    row = row_of({"advantages": made_up()["advantages"], "old": made_up()["logprobs"]})
    p = torch.tensor(made_up()["p"], requires_grad=True)
    by_token, metrics = custom_loss(content).compute(p, row)
    by_token.sum().backward()
    theirs = torch.tensor(made_up()["p"], requires_grad=True)
    total, sums = 0 * theirs.sum(), dict.fromkeys(metrics, 0.0)
    for example, part in zip(row.examples, torch.split(theirs, LENGTHS), strict=True):
        given = (torch.tensor(example.inputs[name]) for name in ("advantages", "old"))
        loss, measured = graph(part, *given)
        total = total + loss
        for name, value in measured.items():
            sums[name] += float(value)
    total.backward()
    torch.testing.assert_close(by_token.sum(), total)
    torch.testing.assert_close(p.grad, theirs.grad)
    assert metrics == pytest.approx(sums)
    # The loss of a datum is at its first token, where an error message names it.
    starts = np.cumsum([0, *LENGTHS[:-1]])
    assert set(by_token.detach().nonzero().reshape(-1).tolist()) <= set(starts.tolist())


def node(op: str, target: str, *args: Any, name: str = "x") -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


REF = {"ref": "p"}
WIDE = [
    node("call_method", "unsqueeze", REF, 1, name="column"),
    node("call_function", "operator.mul", REF, {"ref": "column"}, name="square"),
]
METRIC = {"tuple": [{"ref": "x"}, {"dict": {"a": {"ref": "x"}}}]}
REFUSED = {
    "os": ([node("call_function", "os.system", "true")], "may not call os.system"),
    "host": ([node("call_method", "item", REF)], "may not call item"),
    "in place": ([node("call_method", "add_", REF, 1)], "may not call add_"),
    "texts": ([node("call_function", "operator.mul", "a", 2**40)], "not for these arguments"),
    "powers": ([node("call_function", "operator.pow", 9, 9**9)], "not for these arguments"),
    "attribute": ([node("call_function", "builtins.getattr", REF, "data")], "data"),
    "large": (WIDE, "at square it has more than"),
    "mask": ([node("call_function", "operator.getitem", REF, REF)], "the custom loss fails"),
    "unknown": ([node("call_method", "exp", {"ref": "q"})], "the custom loss fails: 'q'"),
    "device": ([node("call_method", "to", REF, {"device": "cuda"})], "the custom loss fails"),
    "vector": ([node("output", "output", {"tuple": [REF, {"dict": {}}]})], "without dimensions"),
    "metric": ([node("call_method", "sum", REF), node("output", "output", METRIC)], "custom/gap"),
    "nothing": ([], "no output"),
    "no pair": ([node("output", "output", "no")], "the custom loss fails"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_cannot_be_computed_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, reason = REFUSED[name]
    form = {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": [node("placeholder", "p", name="p"), *nodes]},
    }
    monkeypatch.setattr(custom, "MOST_NUMBERS", LENGTHS[0] ** 2 + LENGTHS[0])
    with pytest.raises(DataError, match=reason):
        custom_loss(msgspec.json.encode(form)).compute(torch.zeros(sum(LENGTHS)), row_of({}))


def test_a_body_that_is_no_graph_is_refused() -> None:
    for content in (b"", b"None", b'{"graph": {"nodes": [{"op": "call_module"}]}}'):
        with pytest.raises(DataError, match="bad request"):
            read_graph(content)
