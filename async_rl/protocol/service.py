"""Messages of the training service: requests of training runs to the learner, samples to the
generators.
"""

from typing import Literal

from async_rl.core.types import IntArray
from async_rl.protocol.base import Message, Request
from async_rl.protocol.generator import Completion, Scores

Operation = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "unload_model",
    "save_state",
    "restore",
]
"""The last two are the front's own: write the state of a run, and continue from one; without a path
`restore` forgets the run."""
CHANGING: frozenset[Operation] = frozenset(
    ("create_model", "load_weights", "forward_backward", "optim_step", "unload_model")
)
"""The operations that change a training run: only they are executed again after a crash, in the
order of their numbers."""


class Executed(Message):
    """The answer to a request, in the form of the API.

    body: JSON, or protobuf of forward_backward and forward.  error: why the request was refused
    (then nothing has changed, and body is empty).  version: optimizer steps of the run after it.
    tokens: work of it, for the order among users.
    """

    body: bytes
    version: int
    tokens: int = 0
    error: str = ""


class Execute(Request):
    """front -> learner: execute one request. The requests of a run come in the order of their
    numbers. A learner that has not the run, or whose knowledge of it
    the front does not know, first gets `restore`, and the requests after that state.

    body: as the client sent it: protobuf of forward_backward and forward, JSON otherwise.
    path: where to save or load: a directory below the run's, as the front has resolved it. Other
    operations do not read it.
    step: number of an optimizer step among those of all runs; 0 = it is a repetition, which the
    metrics have.
    """

    Reply = Executed
    run_id: str
    operation: Operation
    body: bytes
    path: str = ""
    step: int = 0


class LoadSlot(Request):
    """front -> generator: let a policy have these weights, unless it has newer ones; requests in
    flight continue with them.

    adapter, version: as in `Sample`.
    """

    policy: str
    adapter: str
    version: int


class Sampled(Message):
    """The answer to Sample.

    sequences: with the stop token or text, and with `likeliest` if the request has num_top.
    prompt [P, W]: each token of the prompt itself, then the likeliest tokens at its position. The
    first row has ids 0 and log-probs NaN. W = 0 if the prompt is not scored.
    """

    sequences: list[Completion]
    prompt: Scores


class Sample(Request):
    """front -> generator: draw sequences.

    request_id: differs between all requests in flight.  adapter: directory in PEFT's form, or of
    all weights; empty = the base model.  version: of it.  policy: whose newest weights it has, in a
    slot where they change while requests are in flight; empty = they never change.
    seed: null = drawn.  stop_ids: null = the model's end tokens, empty = none.  top_k -1 and
    top_p 1 = the whole vocabulary.  num_top: alternatives per token.  num_prompt_top: the same for
    the prompt, null = it is not scored.
    """

    Reply = Sampled
    request_id: str
    token_ids: IntArray
    num_samples: int
    max_tokens: int
    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_texts: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    adapter: str = ""
    policy: str = ""
    version: int = 0
    num_top: int = 0
    num_prompt_top: int | None = None
