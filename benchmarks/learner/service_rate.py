"""Compare the learner of a training service with that of a launched run: forward_backward and
optim_step of the datums that a client makes of a batch, and the step that trains the same adapter
on the batch.

Both run in one process in alternating phases, with the default rows of a CPU. CPU seconds are
compared, as in learner.py.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.service_rate [--rounds N]`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from async_rl.composition.compose import compose
from async_rl.core.types import Group
from async_rl.protocol.service import Execute, Operation
from async_rl.service.proto import ForwardBackwardRequest
from async_rl.service.training import TrainingRuns
from benchmarks.learner.learner import batches, compare, framework_step, random_model

LORA = ("model.lora=lora", "model.lora.rank=8")
RUN = "0000000000000000:train:0"
FLOAT32, INT64 = 1, 2


def datums(groups: Sequence[Group]) -> bytes:
    """Return the request of a batch as recipes make it: no token of a prompt is predicted."""
    request = ForwardBackwardRequest(model_id=RUN, seq_id=1, loss_fn="ppo")
    for group, (index, t) in ((g, it) for g in groups for it in enumerate(g.trajectories)):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = t.token_ids[:-1].astype("<i4").tobytes()
        is_response = t.loss_mask[1:]
        advantages = np.where(is_response, index / len(group.trajectories) - 0.5, 0.0)
        for name, dtype, values in (
            ("target_tokens", INT64, np.where(is_response, t.token_ids[1:], 0).astype("<i8")),
            ("logprobs", FLOAT32, t.behavior_logprobs[1:].astype("<f4")),
            ("advantages", FLOAT32, advantages.astype("<f4")),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = values.tobytes()
            tensor.dtype = dtype
    body: bytes = request.SerializeToString()
    return body


def service_step(model_path: Path, groups: Sequence[Group]) -> Callable[[], None]:
    """Return forward_backward and optim_step of the batch."""
    config = compose("grpo_code", [*LORA, "model.lora.slots=4", "rollout.fn=tinker"])
    runs = TrainingRuns(config, model_path, torch.device("cpu"))

    def ask(operation: Operation, body: bytes) -> None:
        request = Execute(run_id=RUN, operation=operation, body=body)
        assert runs.execute(request).error == ""

    create = {"session_id": "0", "model_seq_id": 0, "base_model": "", "lora_config": {"rank": 8}}
    ask("create_model", msgspec.json.encode(create))
    body = datums(groups)
    adam = msgspec.json.encode(
        {"model_id": RUN, "seq_id": 1, "adam_params": {"learning_rate": 1e-5}}
    )

    def step() -> None:
        ask("forward_backward", body)
        ask("optim_step", adam)

    return step


def main() -> None:
    """Measure every batch and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        model_path = random_model(Path(scratch))
        for name, groups in batches().items():
            # The baseline has the name that `compare` divides by.
            phases = {
                "bare": framework_step("grpo_code", LORA, model_path, groups),
                "service": service_step(model_path, groups),
            }
            compare(name, phases, groups, rounds=arguments.rounds, goal=">= 0.9")


if __name__ == "__main__":
    main()
