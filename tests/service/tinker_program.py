"""Programs for the real client, unmodified: `python tinker_program.py URL KEY` prints what each of
them got, as JSON. A process of its own, because the client's thread never ends.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import tinker
import torch
from tinker import types

PROMPT = types.ModelInput.from_ints([1, 2, 3])


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 1], **inputs},
    )


def life(service: tinker.ServiceClient) -> dict[str, Any]:
    """A life cycle: training, samples, checkpoints, a second run from one of them."""
    client = service.create_lora_training_client(base_model="local/tiny", rank=8).result()
    rows = [datum([1, 2, 3], logprobs=[0.0, -1.0, -1.0], advantages=[0.0, 1.0, 1.0])] * 2
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    # Both are on their way before the first is answered.
    forward = client.forward_backward(rows, "ppo", config)
    step = client.optim_step(types.AdamParams(learning_rate=1e-4))
    output = forward.result()
    sampler = client.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(
        PROMPT, 2, types.SamplingParams(max_tokens=4, stop=[7]), topk_sample_logprobs=3
    ).result()
    saved = client.save_state("one").result().path
    named = client.save_weights_for_sampler("two").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    weights_only = service.create_training_client_from_state(saved).result()
    base = service.create_sampling_client(base_model="local/tiny").result()
    fixed = service.create_sampling_client(model_path=named).result()
    scored = base.sample(
        PROMPT, 1, types.SamplingParams(max_tokens=1), True, topk_prompt_logprobs=2
    ).result()
    return {
        "model_id": client.model_id,
        "metrics": output.metrics,
        "logprobs": [row["logprobs"].tolist() for row in output.loss_fn_outputs],
        "step": step.result().metrics,
        "tokens": [sequence.tokens for sequence in drawn.sequences],
        "sampled": [sequence.logprobs for sequence in drawn.sequences],
        "stops": [sequence.stop_reason for sequence in drawn.sequences],
        "top": drawn.sequences[0].topk_logprobs,
        "ids": [sequence.sequence_id for sequence in drawn.sequences],
        "saved": saved,
        "named": named,
        "again": again.model_id,
        "weights_only": weights_only.model_id,
        "rank": again.get_info().lora_rank,
        "tokenizer": again.get_info().model_data.tokenizer_id,
        "base_model": fixed.get_base_model(),
        "prompt": base.compute_logprobs(PROMPT).result(),
        "scored": scored.topk_prompt_logprobs,
    }


def custom(service: tinker.ServiceClient) -> dict[str, Any]:
    """A loss that the client computes itself, from log-probs, by two requests."""
    client = service.create_lora_training_client(base_model="local/tiny", rank=8).result()

    def loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = sum((row**2).sum() for row in logprobs)
        return total, {"squares:sum": float(total)}

    output = client.forward_backward_custom([datum([1, 2, 3])], loss).result()
    client.optim_step(types.AdamParams()).result()
    return {"model_id": client.model_id, "metrics": output.metrics}


def chunks(service: tinker.ServiceClient) -> dict[str, Any]:
    """A batch that the client sends in parts, the first one last."""
    client = service.create_lora_training_client(base_model="local/tiny", rank=8).result()
    rows = [datum([1 + index % 90, 2, 3]) for index in range(10_500)]
    forward = client.forward_backward(rows, "cross_entropy")
    client.optim_step(types.AdamParams())
    return {"model_id": client.model_id, "rows": len(forward.result().loss_fn_outputs)}


def inflight(service: tinker.ServiceClient) -> dict[str, Any]:
    """A sampler whose weights follow the run, and a training batch that names its origin."""
    client = service.create_lora_training_client(base_model="local/tiny", rank=8).result()
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    for _ in range(3):
        client.forward_backward([datum([1, 2, 3])], "cross_entropy")
        client.optim_step(types.AdamParams()).result()
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    sequence = first.sample(PROMPT, 1, types.SamplingParams(max_tokens=4)).result().sequences[0]
    tokens = [1, 2, 3, *sequence.tokens]
    prompt = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=3)
    sampled = types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=3)
    target = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=2)
    whole = types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=4)

    def batch(logprobs: list[float]) -> types.Datum:
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [0.0, 0.0, *logprobs],
                "advantages": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
            },
            model_input_spans=[prompt, sampled],
            loss_fn_input_spans=[target, whole],
        )

    honest = client.forward_backward([batch(sequence.logprobs)], "importance_sampling").result()
    lie = client.forward_backward([batch([*sequence.logprobs[:3], -9.0])], "importance_sampling")
    try:
        lie.result()
        refused = ""
    except tinker.RequestFailedError as error:
        refused = str(error)
    return {
        "model_id": client.model_id,
        "id": sequence.sequence_id,
        "metrics": honest.metrics,
        "refused": refused,
    }


def refused(service: tinker.ServiceClient) -> dict[str, Any]:
    """What the client's user sees of refusals, and that the run goes on after them."""
    errors = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (tinker.TinkerError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    def create(**more: Any) -> Any:
        named = {"base_model": "local/tiny", "rank": 8, **more}
        return service.create_lora_training_client(**named).result()

    attempt("model", lambda: create(base_model="other"))
    attempt("rank", lambda: create(rank=64))
    attempt("dimuon", lambda: create(optimizer=types.DimuonOptimizerConfig()))
    # A name of the hub stands for a directory of this name.
    client = create(base_model="org/tiny")
    row = datum([1, 2, 3])
    attempt("loss", lambda: client.forward_backward([row], "stable_reinforce").result())
    attempt("path", lambda: service.create_sampling_client(model_path="tinker://a/b/c").result())
    client.forward_backward([row], "cross_entropy").result()
    return errors


PROGRAMS = (life, custom, chunks, inflight, refused)


def main() -> None:
    url, key = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        got = {program.__name__: program(service) for program in PROGRAMS}
    finally:
        service.close("success").result()
    print(json.dumps(got))  # noqa: T201


if __name__ == "__main__":
    main()
