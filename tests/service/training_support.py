"""A service's learner on a tiny random model, and requests as a client sends them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from learner_support import VOCABULARY, make_config

from async_rl.protocol.service import Execute, Executed, Operation
from async_rl.service import proto
from async_rl.service.training import TrainingRuns

CPU = torch.device("cpu")
RUN = "00000000000000aa:train:0"
OTHER = "00000000000000bb:train:0"
SERVICE = (
    "rollout.fn=tinker",
    "model.lora=lora",
    "model.lora.rank=8",
    "model.lora.alpha=16",
    "model.lora.slots=4",
)


def make_runs(model_path: Path, *overrides: str, service: Sequence[str] = SERVICE) -> TrainingRuns:
    config = make_config("grpo_code", *service, *overrides)
    return TrainingRuns(config, model_path, CPU, clock=lambda: 0.0)


def create(rank: int = 4, **lora: Any) -> bytes:
    return as_json(
        session_id="00000000000000aa",
        model_seq_id=0,
        base_model="base",
        lora_config={"rank": rank, "seed": 3, **lora},
    )


def as_json(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def optim(run_id: str = RUN, **adam: float) -> bytes:
    return as_json(model_id=run_id, seq_id=1, adam_params={"learning_rate": 0.01, **adam})


def data_request(
    data: Sequence[Mapping[str, np.ndarray]], loss: str, config: Mapping[str, float] | None = None
) -> bytes:
    """A forward_backward of datums that are given by their tokens and inputs."""
    rows = [
        proto.Datum(
            tokens=fields["tokens"],
            inputs={name: values for name, values in fields.items() if name != "tokens"},
        )
        for fields in data
    ]
    return proto.encode_batch(rows, RUN, 1, loss, config or {})


def make_datum(
    rng: np.random.Generator, size: int, loss: str, alternatives: int = 0
) -> dict[str, np.ndarray]:
    """Random tokens and inputs; the first third is a prompt."""
    shape = (size, alternatives) if alternatives else (size,)
    datum = {
        "tokens": rng.integers(0, VOCABULARY, size),
        "target_tokens": rng.integers(0, VOCABULARY, shape),
    }
    is_sampled = np.arange(size) >= size // 3
    if loss == "cross_entropy":
        # Signed, as a client's own loss sends them.
        return datum | {"weights": rng.normal(size=shape).astype(np.float32)}
    datum["logprobs"] = np.where(is_sampled, -rng.uniform(0.5, 5, size), 0).astype(np.float32)
    datum["advantages"] = np.where(is_sampled, rng.normal(size=size), 0).astype(np.float32)
    if loss == "gspo":
        datum["sequence_ratio_mask"] = is_sampled.astype(np.float32)
    return datum


def ask(
    runs: TrainingRuns,
    operation: Operation,
    body: bytes = b"",
    *,
    run_id: str = RUN,
    path: Path | str = "",
    step: int = 0,
) -> Executed:
    """Execute a request whatever comes of it."""
    return runs.execute(
        Execute(run_id=run_id, operation=operation, body=body, path=str(path), step=step)
    )


def done(*arguments: Any, **options: Any) -> Executed:
    """Execute a request that must succeed."""
    executed = ask(*arguments, **options)
    assert executed.error == "", executed.error
    return executed


def started(runs: TrainingRuns, run_id: str = RUN, **lora: Any) -> TrainingRuns:
    """The runs with a new one among them."""
    done(runs, "create_model", create(**lora), run_id=run_id)
    return runs


def answer(executed: Executed) -> tuple[list[np.ndarray], dict[str, float]]:
    """The log-probs of each datum, and the metrics."""
    return proto.read_output(executed.body)


def weights(runs: TrainingRuns, run_id: str = RUN) -> dict[str, torch.Tensor]:
    """Copies of weights and moments."""
    return {name: x.detach().clone() for name, x in runs.tenants[run_id].tensors().items()}


def gradients(runs: TrainingRuns, run_id: str = RUN) -> dict[str, torch.Tensor]:
    weights = runs.tenants[run_id].weights
    return {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}


def equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
