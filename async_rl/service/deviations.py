"""What this service does in another way than the API says, and what it refuses (docs/service.md has
the same table). Clients show it at the start of a session.
"""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.core.errors import DataError

DEVIATIONS: Mapping[str, str] = {
    "stable_reinforce": "refused: its formula is not published; use ppo, cispo or"
    " importance_sampling",
    "dimuon": "refused: the optimizer is not published; use adamw",
    "rank 0": "is all weights, and refused unless the service was started with model.lora=none,"
    " which refuses other ranks; its programs take turns",
    "gspo": "has the thresholds of arXiv 2507.18071 unless others are given, and dro needs a beta:"
    " the API publishes no defaults",
    "images and sounds": "refused: only tokens can be sampled and trained",
    "age_encryption_recipients": "refused: exported files are not encrypted; leave it out",
    "train_unembed": "has no effect: the output head has no adapter, because the generators serve"
    " none",
    "alpha": "is model.lora.alpha for adapters of every rank",
    "stop": "text stops a sequence next to the model's end tokens; a list of tokens replaces them",
    "create_custom_loss": "refuses a graph with other calls than those of its error; a function"
    " without handle, in forward_backward_custom, is not limited",
    "seed": "the same seed gives the same sequence only in a batch of the same size",
}
"""By the name of a value or a feature."""
WARNING = "This server differs from the API: " + "; ".join(
    f"{name}: {text}" for name, text in DEVIATIONS.items()
)


def refuse(name: str) -> None:
    """Raise DataError if this value or feature is refused."""
    text = DEVIATIONS.get(name, "")
    if text.startswith("refused"):
        raise DataError(f"{name} is {text}")
