"""Programs for the real client, unmodified: `python tinker_program.py URL KEY` runs each of them,
checks what its user sees, and prints the training runs by program as JSON. A process of its own,
because the client's thread never ends.

Played generators: token i of sequence s is the prompt's sum + i + s, its log-prob -i / 7 - s.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tinker
import torch
from tinker import types

PROMPT = types.ModelInput.from_ints([1, 2, 3])


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 1], **inputs},
    )


def started(service: tinker.ServiceClient, **more: Any) -> Any:
    named = {"base_model": "local/tiny", "rank": 8, **more}
    return service.create_lora_training_client(**named).result()


def life(service: tinker.ServiceClient) -> str:
    """Training, samples, checkpoints, and further runs from one of them."""
    client = started(service)
    run = client.model_id
    rows = [datum([1, 2, 3], logprobs=[0.0, -1.0, -1.0], advantages=[0.0, 1.0, 1.0])] * 2
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    # Both are on their way before the first is answered.
    forward = client.forward_backward(rows, "ppo", config)
    step = client.optim_step(types.AdamParams(learning_rate=1e-4))
    assert forward.result().metrics["loss:sum"] > 0
    assert [len(row["logprobs"].tolist()) for row in forward.result().loss_fn_outputs] == [3, 3]
    assert step.result().metrics["chain"] > 0
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=4, stop=[7])
    drawn = sampler.sample(PROMPT, 2, settings, topk_sample_logprobs=3).result().sequences
    assert [it.tokens for it in drawn] == [[6, 7, 8, 9], [7, 8, 9, 10]]
    assert [round(7 * x, 4) for x in drawn[1].logprobs] == [-7, -8, -9, -10]
    assert [it.stop_reason for it in drawn] == ["stop", "length"]
    assert [[list(pair) for pair in top] for top in drawn[0].topk_logprobs] == [[[1, -0.5]] * 3] * 4
    assert drawn[0].sequence_id != drawn[1].sequence_id
    saved = client.save_state("one").result().path
    named = client.save_weights_for_sampler("two").result().path
    assert (saved, named) == (f"tinker://{run}/weights/one", f"tinker://{run}/sampler_weights/two")
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    weights_only = service.create_training_client_from_state(saved).result()
    session = run.partition(":")[0]
    ids = (again.model_id, weights_only.model_id)
    assert ids == (f"{session}:train:1", f"{session}:train:2")
    info = again.get_info()
    assert (info.lora_rank, info.model_data.tokenizer_id) == (8, "local/tiny")
    fixed = service.create_sampling_client(model_path=named).result()
    assert fixed.get_base_model() == "local/tiny"
    base = service.create_sampling_client(base_model="local/tiny").result()
    one = types.SamplingParams(max_tokens=1)
    scored = base.sample(PROMPT, 1, one, True, topk_prompt_logprobs=2).result().topk_prompt_logprobs
    assert scored[0] is None
    assert [[list(pair) for pair in top] for top in scored[1:]] == [[[1, -1.5]] * 2] * 2
    assert base.compute_logprobs(PROMPT).result() == [None, -1.0, -2.0]
    return str(run)


def custom(service: tinker.ServiceClient) -> str:
    """A loss that the client computes itself, from log-probs, by two requests."""
    client = started(service)

    def loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = sum((row**2).sum() for row in logprobs)
        return total, {"squares:sum": float(total)}

    output = client.forward_backward_custom([datum([1, 2, 3])], loss).result()
    assert output.metrics["squares:sum"] > 0
    client.optim_step(types.AdamParams()).result()
    return str(client.model_id)


def chunks(service: tinker.ServiceClient) -> str:
    """A batch that the client sends in parts, the first one last."""
    client = started(service)
    rows = [datum([1 + index % 90, 2, 3]) for index in range(10_500)]
    forward = client.forward_backward(rows, "cross_entropy")
    client.optim_step(types.AdamParams())
    assert len(forward.result().loss_fn_outputs) == 10_500
    return str(client.model_id)


def inflight(service: tinker.ServiceClient) -> str:
    """A sampler whose weights follow the run, and a training batch that names its origin."""
    client = started(service)
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    for _ in range(3):
        client.forward_backward([datum([1, 2, 3])], "cross_entropy")
        client.optim_step(types.AdamParams()).result()
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    sequence = first.sample(PROMPT, 1, types.SamplingParams(max_tokens=4)).result().sequences[0]
    tokens = [1, 2, 3, *sequence.tokens]
    name = sequence.sequence_id
    inputs = [
        types.PromptProvenanceSpan(sequence_id=name, length=3),
        types.SampledProvenanceSpan(sequence_id=name, length=3),
    ]
    targets = [
        types.PromptProvenanceSpan(sequence_id=name, offset=1, length=2),
        types.SampledProvenanceSpan(sequence_id=name, length=4),
    ]

    def trained(logprobs: list[float]) -> Any:
        row = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [0.0, 0.0, *logprobs],
                "advantages": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
            },
            model_input_spans=inputs,
            loss_fn_input_spans=targets,
        )
        return client.forward_backward([row], "importance_sampling").result().metrics

    metrics = trained(sequence.logprobs)
    # Played: the first half of the tokens has the first version, the rest the newest one.
    assert (metrics["age_mean:mean"], metrics["age_max:max"]) == (1.5, 3.0)
    refused(lambda: trained([*sequence.logprobs[:3], -9.0]), "logprobs[5] is -9.0, and -0.42")
    return str(client.model_id)


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((tinker.TinkerError, ValueError), match=re.escape(text)):
        call()


def refusals(service: tinker.ServiceClient) -> str:
    """What the client's user sees of refusals, and that the run goes on after them."""
    refused(lambda: started(service, base_model="other"), "use 'local/tiny'")
    refused(lambda: started(service, rank=64), "rank=64 is not trained here: model.lora.rank=32")
    refused(lambda: started(service, optimizer=types.DimuonOptimizerConfig()), "use adamw")
    # A name of the hub stands for a directory of this name.
    client = started(service, base_model="org/tiny")
    row = datum([1, 2, 3])
    unpublished = client.forward_backward([row], "stable_reinforce")
    refused(unpublished.result, "use ppo, cispo")
    wrong = "tinker://a/b/c"
    refused(lambda: service.create_sampling_client(model_path=wrong).result(), "never saved here")
    client.forward_backward([row], "cross_entropy").result()
    return str(client.model_id)


PROGRAMS = (life, custom, chunks, inflight, refusals)


def main() -> None:
    url, key = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        runs = {program.__name__: program(service) for program in PROGRAMS}
    finally:
        service.close("success").result()
    print(json.dumps(runs))  # noqa: T201


if __name__ == "__main__":
    main()
