"""Graphs of custom losses, as clients send them, and the operations that they may have.

Nothing of a graph is executed but these operations. None of them draws numbers, leaves torch or
changes a tensor.
"""

from __future__ import annotations

from typing import Any

from async_rl.core.errors import DataError
from async_rl.service.forms import read

CUSTOM = "custom"
"""The name of the loss."""
GRAPH = "graph"
"""The value of its configuration that has the body of create_custom_loss."""
_NAMES = """
abs add all amax amin and_ any argmax argmin bool cat ceil clamp clamp_max clamp_min clip cos cummax
cummin cumsum detach div double elu eq exp expand_as expm1 flatten flip float float_power floor ge
gelu getattr getitem gt huber_loss invert isfinite isinf isnan l1_loss le lerp log log10 log1p log2
log_sigmoid log_softmax logaddexp logcumsumexp logical_and logical_not logical_or logical_xor
logsumexp long lt masked_fill max maximum mean median min minimum mse_loss mul multiply nan_to_num
ne neg negative norm ones_like or_ pos pow prod reciprocal relu reshape round rsqrt rsub select sgn
sigmoid sign silu sin smooth_l1_loss softmax softplus sqrt square squeeze stack std sub subtract sum
t tanh to transpose tril triu true_divide truediv trunc unsqueeze var view where xor zeros_like
"""
OPERATIONS = frozenset(_NAMES.split())
"""Functions of torch and `operator`, and methods of tensors."""


def read_graph(body: bytes) -> Any:
    """Return the body of create_custom_loss. Raises DataError if it is none, or calls anything that
    is not in the list.
    """
    form = read(body, "create_custom_loss")
    for node in form.graph.nodes:
        name = node.target.rpartition(".")[2]
        if node.op.startswith("call") and name not in OPERATIONS:
            raise DataError(
                f"a custom loss may not call {node.target}; it may call"
                f" {', '.join(sorted(OPERATIONS))}. forward_backward_custom takes any function"
            )
    return form
