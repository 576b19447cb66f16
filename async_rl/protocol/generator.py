"""Messages to a generator: load weights, score rows, continue a row of tokens, read tool calls,
release the device, drain.
"""

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from async_rl.core.calls import Span
from async_rl.core.frozen import Value
from async_rl.core.types import NO_VERSION, BoolArray, FloatArray, IntArray, Sampling
from async_rl.protocol.base import Message, Request
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source


class LoadReport(Message):
    """The generator now samples with `version`.

    pause_s: seconds without generation.
    """

    version: int
    pause_s: float


class LoadWeights(Request):
    """Load this version from `source` between two engine steps; requests in flight continue.

    handover: with placement=colocated, the number of the handover in which the learner returned
    the device (weights/handovers.py).
    """

    Reply = LoadReport
    manifest: Manifest
    source: Source = SHARED_BLOCK
    # A generator refuses a smaller number than it has seen, so an order of a dead learner cannot
    # wake it while the next learner uses the device.
    handover: int = 0


class Logprobs(Message):
    """float32 log-probs per row and the version that computed them.

    Entry t of a row is about its token t; the first token has none, its entry is 0.
    """

    version: int
    rows: list[FloatArray]


class Probe(Request):
    """Score these rows of token ids with the current weights at temperature 1."""

    Reply = Logprobs
    rows: list[IntArray]


class Scores(Value):
    """Tokens at N positions: ids int32, logprobs float32 [N, K]."""

    ids: IntArray
    logprobs: FloatArray


class Completion(Value):
    """Tokens after a row of tokens, which the policy wrote or, in a sample of several turns, read.

    Position t of each array is about the t-th new token, including an end-of-sequence token:
    token_ids int32 [N]; logprobs float32 [N], of the distribution sampled from, after temperature;
    versions int32 [N]. A token that the policy only read has log-prob 0 and NO_VERSION.
    is_truncated: stopped by the length limit, without an end-of-sequence token.
    spans: of tokens that were not drawn from the whole vocabulary.
    index: among the samples of one request. first_s: monotonic seconds of the engine's machine when
    the first token existed; NaN: unknown. likeliest, prompt: as `Sampling.alternatives` requests
    them; of the row before, `prompt` has each token, then the likeliest ones, and ids 0 and
    log-probs NaN for the first. The version of the first token of any sample of the request may
    have read it: vLLM merges the outputs of samples that end together and keeps the prompt of one,
    and a push may fall between their first tokens.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    is_truncated: bool
    index: int = 0
    first_s: float = math.nan
    spans: tuple[Span, ...] = ()
    likeliest: Scores | None = None
    prompt: Scores | None = None

    @property
    def is_written(self) -> BoolArray:
        """True for the tokens that the policy wrote."""
        is_written: BoolArray = self.versions != NO_VERSION
        return is_written


def only_read(token_ids: IntArray) -> Completion:
    """Return tokens that the policy reads and is not trained on."""
    return Completion(
        token_ids=token_ids,
        # One number in memory each: gateways keep millions of such tokens.
        logprobs=np.broadcast_to(np.float32(0), len(token_ids)),
        versions=np.broadcast_to(np.int32(NO_VERSION), len(token_ids)),
        is_truncated=False,
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Return consecutive parts as one."""
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
    likeliest = [part.likeliest for part in parts if part.likeliest is not None]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        is_truncated=parts[-1].is_truncated,
        first_s=parts[0].first_s,
        spans=tuple(
            replace(span, start=span.start + start, end=span.end + start)
            for start, part in zip(starts, parts, strict=False)
            for span in part.spans
        ),
        likeliest=_rows(likeliest) if len(likeliest) == len(parts) else None,
        prompt=parts[0].prompt,
    )


def _rows(scores: Sequence[Scores], most: int | None = None) -> Scores:
    """Return the positions of all scores, at most `most`."""
    return Scores(
        ids=np.concatenate([each.ids for each in scores])[:most],
        logprobs=np.concatenate([each.logprobs for each in scores])[:most],
    )


def cut(whole: Completion, most: int) -> Completion:
    """Return the first tokens, at most `most`; a part without the end is truncated."""
    token_ids = whole.token_ids[:most]
    return Completion(
        token_ids=token_ids,
        logprobs=whole.logprobs[:most],
        versions=whole.versions[:most],
        is_truncated=whole.is_truncated or len(token_ids) < len(whole.token_ids),
        spans=tuple(
            replace(span, end=min(span.end, most)) for span in whole.spans if span.start < most
        ),
        likeliest=None if whole.likeliest is None else _rows([whole.likeliest], most),
        prompt=whole.prompt,
    )


class Continuation(Message):
    """The answer to Complete."""

    completed: Completion


class Complete(Request):
    """gateway -> generator: continue these tokens once. Sent again, it draws another continuation.

    request_id: differs between all calls that are in flight.
    """

    Reply = Continuation
    request_id: str
    token_ids: IntArray
    sampling: Sampling


class CallsRead(Message):
    """The tool calls of an answer, by id (empty if the parser gives none), name and arguments.

    content: the text next to them. Without calls the parser found none that it can read. thinking:
    the text before both.
    """

    content: str
    calls: list[tuple[str, str, str]]
    thinking: str = ""


class ReadCalls(Request):
    """gateway -> generator: read the tool calls and the thinking of a complete answer.

    parser, thinking: the names of vLLM's parsers, one of which may be empty; text: with special
    tokens, without the end token; tools: the tools of the request, as JSON.
    """

    Reply = CallsRead
    parser: str
    # Both: some parsers search the text for tags, others need the special tokens.
    text: str
    token_ids: IntArray
    tools: bytes
    thinking: str = ""


class EngineVersion(Message):
    """The version that the generator samples with, -1 before the first load, and the life of the
    learner that made it.
    """

    version: int
    life: int


class WatchVersion(Request):
    """gateway -> generator: answered once the weights are not the known ones, or after wait_s."""

    Reply = EngineVersion
    # Not "the next version": a version that was loaded before the request arrived is reported too.
    known: EngineVersion
    wait_s: float


class Sleep(Request):
    """learner -> generator: release the device until weights come; answered once that is done.

    handover: as in weights/handovers.py.
    """

    handover: int


class Drain(Request):
    """supervisor -> generator or gateway: take no more work, finish the groups in flight, then
    exit.
    """
