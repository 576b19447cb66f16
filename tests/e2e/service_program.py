"""A program of the tinker client that trains, samples and saves: `python service_program.py URL
KEY`. It prints the name of each pause and goes on after a line on standard input; the last line is
what it got, as JSON. A process of its own, because the client's thread never ends.
"""

import json
import sys

import numpy as np
import tinker
from tinker import types

PROMPT = types.ModelInput.from_ints([21, 22, 23])
MOST_TOKENS = 200
RATE = types.AdamParams(learning_rate=1e-2)


def pause(name: str) -> None:
    print(name, flush=True)  # noqa: T201
    sys.stdin.readline()


def main(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(base_model="tiny_coder", rank=8, seed=3).result()
    rng = np.random.default_rng(0)

    def datum() -> types.Datum:
        ids = rng.integers(10, 190, 25).tolist()
        inputs = {"target_tokens": ids[1:], "logprobs": [-5.0] * 24, "advantages": [1.0, -0.5] * 12}
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    losses = []
    for name in ("learner", "gateway", "everything"):
        first = client.forward_backward([datum(), datum()], "importance_sampling")
        second = client.forward_backward([datum()], "ppo")
        pause(name)
        client.optim_step(RATE).result()
        losses += [future.result().metrics["loss:sum"] for future in (first, second)]
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=MOST_TOKENS, stop=[])
    drawing = [sampler.sample(PROMPT, 2, settings) for _ in range(4)]
    pause("generator")
    drawn = [sequence for future in drawing for sequence in future.result().sequences]
    whole = [one.stop_reason == "stop" or len(one.tokens) == MOST_TOKENS for one in drawn]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([*range(20, 40)])).result()
    found = {
        "losses": losses,
        "drawn": sum(whole),
        "scored": scored[1:],
        "state": client.save_state("last").result().path,
    }
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
