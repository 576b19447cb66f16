"""The JSON bodies of the API's requests, whose fields are in forms.toml, and what is refused in
them.

Of the graph of a custom loss only the operations below are executed. None of them draws numbers,
leaves torch or changes a tensor.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.sessions.bodies import types_of


class LoraConfig(msgspec.Struct):
    """Of create_model."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text())


FORMS = types_of(_table("forms.toml"), {"lora": LoraConfig})
DEVIATIONS: Mapping[str, str] = _table("deviations.toml")
WARNING = "This server differs from the API: " + "; ".join(
    f"{name}: {text}" for name, text in DEVIATIONS.items()
)
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


def read(body: bytes, form: str) -> Any:
    """Return a body as a form. Raises DataError with the path of the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=FORMS[form])
    # Deep nesting raises RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"bad request: {error}") from error


def words(metadata: Any) -> str:
    """Return metadata as JSON, with texts as values, which clients expect."""
    return msgspec.json.encode({name: str(it) for name, it in (metadata or {}).items()}).decode()


def refuse(name: str) -> None:
    """Raise DataError if this value or feature is refused."""
    text = DEVIATIONS.get(name, "")
    if text.startswith("refused"):
        raise DataError(f"{name} is {text}")


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
