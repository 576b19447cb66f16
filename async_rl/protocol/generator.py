"""Messages to a generator: load weights, score rows, continue a row of tokens, read tool calls,
release the device, drain.

policy: the name of another run's policy that this generator serves too (rollouts/hosting.py); empty
= the policy of its own run.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.core.frozen import Value
from async_rl.core.types import FloatArray, IntArray, Sampling
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source


class LoadReport(Message):
    """The generator now samples with `version`.

    load_s: seconds of the whole load. pause_s: seconds without generation.
    """

    version: int
    load_s: float
    pause_s: float


class LoadWeights(Message):
    """Load this version from `source` between two engine steps; requests in flight continue.

    handover: with placement=colocated, the number of the handover in which the learner returned
    the device (weights/handovers.py).
    """

    Reply: ClassVar[type] = LoadReport
    manifest: Manifest
    source: Source = SHARED_BLOCK
    # A generator refuses a smaller number than it has seen, so an order of a dead learner cannot
    # wake it while the next learner uses the device.
    handover: int = 0
    policy: str = ""


class Logprobs(Message):
    """float32 log-probs per row and the version that computed them.

    Entry t of a row is about its token t; the first token has none, its entry is 0.
    """

    version: int
    rows: list[FloatArray]


class Probe(Message):
    """Score these rows of token ids with the current weights at temperature 1."""

    Reply: ClassVar[type] = Logprobs
    rows: list[IntArray]
    policy: str = ""


class Completed(Value):
    """The tokens that the policy wrote after a row of tokens; arrays as in generation's Completion.

    is_truncated: stopped by the length limit, without an end-of-sequence token.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    is_truncated: bool


class Continuation(Message):
    """The answer to Complete."""

    completed: Completed


class Complete(Message):
    """gateway or another run's generator -> generator: continue these tokens once. Sent again, it
    draws another continuation.

    request_id: differs between all calls that are in flight.
    """

    Reply: ClassVar[type] = Continuation
    request_id: str
    token_ids: IntArray
    sampling: Sampling
    policy: str = ""


class CallsRead(Message):
    """The tool calls of an answer, by id (empty if the parser gives none), name and arguments.

    content: the text next to them. Without calls the parser found none that it can read.
    """

    content: str
    calls: list[tuple[str, str, str]]


class ReadCalls(Message):
    """gateway -> generator: read the tool calls of a complete answer.

    parser: its name in vLLM; text: with special tokens, without the end token; tools: the tools of
    the request, as JSON.
    """

    Reply: ClassVar[type] = CallsRead
    parser: str
    # Both: some parsers search the text for tags, others need the special tokens.
    text: str
    token_ids: IntArray
    tools: bytes


class EngineVersion(Message):
    """The version that the generator samples with; -1 before the first load."""

    version: int


class WatchVersion(Message):
    """gateway -> generator: answered once the version is not `known`, or after wait_s."""

    Reply: ClassVar[type] = EngineVersion
    # Not "the next version": a version that was loaded before the request arrived is reported too.
    known: int
    wait_s: float


class Visit(Message):
    """another run's generator -> generator: keep a slot for the policy, first a new one;
    -> supervisor: a run uses the generators. Both are repeated as long as that generator lives.
    """

    Reply: ClassVar[type] = Ok
    policy: str


class Leave(Message):
    """another run's generator -> generator: free the slot. -> supervisor: that run stops."""

    Reply: ClassVar[type] = Ok
    policy: str


class Sleep(Message):
    """learner -> generator: release the device until weights come; answered once that is done.

    handover: as in weights/handovers.py.
    """

    Reply: ClassVar[type] = Ok
    handover: int


class Drain(Message):
    """supervisor -> generator or gateway: take no more work, finish the groups in flight, then
    exit.
    """

    Reply: ClassVar[type] = Ok
