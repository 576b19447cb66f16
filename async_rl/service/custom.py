"""Custom losses: the graph of a client, computed for each datum.

Invariant: a graph runs without data first, on torch's meta device, so one that makes too large a
tensor allocates nothing.
"""

import collections
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.service.forms import CUSTOM, Node, Nodes, read_graph
from async_rl.service.losses import Loss, Row

_MODULES: Sequence[Any] = (torch, F, operator, torch._C._nn)
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
MOST_NUMBERS = 2**28
"""In all tensors of a datum: room for four pairs of every two of 8,192 tokens."""


@frozen
class GraphLoss(Loss):
    """A loss that a client has made."""

    graph: Nodes

    def compute(self, p: Tensor, row: Row) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of each datum at its first token, 0 at its others, and the sums of the
        metrics. Raises DataError.
        """
        losses = []
        metrics = collections.defaultdict[str, float](float)
        for part, example in zip(torch.split(p, row.lengths), row.examples, strict=True):
            given = [torch.as_tensor(example.inputs[name]) for name in self.inputs]
            for device in ("meta", p.device):
                loss, found = self._run([part.to(device), *(x.to(device) for x in given)])
            # A loss that does not depend on the log-probs has a gradient of 0.
            loss = loss + 0 * part.sum()
            losses.append(F.pad(loss.reshape(1), (0, len(part) - 1)))
            for name, value in found.items():
                metrics[name] += float(value)
        return torch.cat(losses), metrics

    def _run(self, given: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            loss, metrics = execute(self.graph, given)
            is_valid = loss.ndim == 0 and all(
                _METRIC.fullmatch(name) and x.numel() == 1 for name, x in metrics.items()
            )
        # A wrong graph can make torch, or this, raise anything.
        except Exception as error:
            raise DataError(f"the custom loss fails: {error}") from error
        if not is_valid:
            raise DataError(
                "a custom loss returns a tensor without dimensions, and a dict of such tensors by"
                " names such as custom/gap:mean"
            )
        return loss, metrics


def custom_loss(body: bytes) -> GraphLoss:
    """Return the loss of a body of create_custom_loss. Raises DataError."""
    form = read_graph(body)
    logprobs, *inputs = form.inputs
    return GraphLoss(
        name=CUSTOM,
        inputs=[it.name for it in inputs],
        most_rank=logprobs.rank,
        ranks={it.name: it.rank for it in inputs},
        graph=form.graph,
    )


def execute(graph: Nodes, given: Sequence[Tensor]) -> Any:
    """Return what a graph returns for these arguments."""
    known: dict[str, Any] = {}
    parameters = iter(given)
    size = 0

    def value(arg: Any) -> Any:
        match arg:
            case {"ref": name}:
                return known[name]
            case {"tuple": parts}:
                return tuple(map(value, parts))
            case {"slice": parts}:
                return slice(*map(value, parts))
            case {"dict": parts}:
                return {name: value(part) for name, part in parts.items()}
            case {"float": text}:
                return float(text)
            case {"dtype": name}:
                return _DTYPES[name]
            case {"ellipsis": _}:
                return ...
            case list():
                return list(map(value, arg))
        return arg

    for node in graph.nodes:
        args = value(node.args)
        kwargs = {name: value(it) for name, it in node.kwargs.items()}
        if node.op == "output":
            return args[0]
        made = next(parameters, None) if node.op == "placeholder" else _call(node, args, kwargs)
        size += sum(x.numel() for x in _leaves(made) if isinstance(x, Tensor))
        if size > MOST_NUMBERS:
            raise ValueError(f"at {node.name} it has more than {MOST_NUMBERS} numbers")
        known[node.name] = made
    raise ValueError("it has no output")


def _call(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = node.target.rpartition(".")[2]
    first = args[0]
    if name == "getattr":
        return {"shape": first.shape, "ndim": first.ndim}[args[1]]
    if name == "getitem" and isinstance(first, tuple):
        return first[args[1]]
    has_tensor = any(isinstance(x, Tensor) for x in _leaves((args, kwargs)))
    # Numbers and texts alone could grow without bounds.
    if not has_tensor:
        raise ValueError(f"{node.target} of {node.name} is not for these arguments")
    if node.op == "call_method":
        return getattr(Tensor, name)(*args, **kwargs)
    found = (getattr(module, name) for module in _MODULES if hasattr(module, name))
    return next(found)(*args, **kwargs)


def _leaves(value: object) -> Iterator[object]:
    """What a value has at the ends of its sequences and mappings."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
