"""One batch of the transformers engine: its samples, and the lock that its model is used under."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from async_rl.core.errors import Unavailable
from async_rl.core.types import Sampling
from async_rl.generation.engine import Completion


class Writer(Protocol):
    """The part of the engine that a batch uses."""

    @property
    def version(self) -> int:
        """Version of the current weights."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sample."""

    @property
    def is_asleep(self) -> bool:
        """The batch is to end after this token; unfinished samples are continued later."""

    def give_way(self) -> int:
        """Let others use the model between two tokens; returns the version from now on."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and the queue of its completions; an error in the queue fails the request."""

    request_id: str
    prompt: list[int]
    num_samples: int
    sampling: Sampling
    finished: asyncio.Queue[Completion | Unavailable] = field(default_factory=asyncio.Queue)
    is_aborted: bool = False


class Row:
    """One sample while it is written."""

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.first_s = math.nan
        self.is_done = False

    @property
    def is_open(self) -> bool:
        """The sample needs more tokens."""
        return not (self.is_done or self.request.is_aborted)

    def completion(self, *, is_truncated: bool) -> Completion:
        """The tokens written so far."""
        return Completion(
            index=self.index,
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            is_truncated=is_truncated,
            first_s=self.first_s,
        )


class DecodeBatch:
    """Samples that the model writes together; their requests have equal sampling settings."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.sampling = requests[0].sampling
        self.rows = [
            Row(request, index) for request in requests for index in range(request.num_samples)
        ]

    def drop_finished(self) -> None:
        """Keep the samples that need more tokens."""
        self.rows = [row for row in self.rows if row.is_open]

    @property
    def num_remaining(self) -> int:
        """The most tokens that any sample may still get."""
        return self.sampling.max_new_tokens - min(len(row.token_ids) for row in self.rows)

    def padded(self, pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and attention mask, int64 [B, L], padded on the left."""
        # Padded on the left: the next token must follow the last one of every row.
        texts = [row.request.prompt + row.token_ids for row in self.rows]
        longest = max(map(len, texts))
        input_ids = [[pad] * (longest - len(text)) + text for text in texts]
        mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        return torch.tensor(input_ids, device=device), torch.tensor(mask, device=device)

    def seed(self, seed: int) -> int:
        """Return a seed that depends on the groups, not on the attempt to generate them.

        So a resumed run repeats itself. A continued batch gets other random numbers than its start.
        """
        names = (row.request.request_id.partition(".")[0] for row in self.rows)
        groups = list(dict.fromkeys(names))
        num_written = [len(row.token_ids) for row in self.rows]
        return zlib.crc32(f"{seed} {groups}{num_written if any(num_written) else ''}".encode())


class _Temperature:
    """A logits processor of transformers: divides the logits and keeps the log-probs that the
    next token is drawn from. It is the last processor: `generate` adds none after it.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self.table = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] -> float32 [B, V], the logits that the token is drawn from."""
        scores = scores.float() / self._temperature
        self.table = scores.log_softmax(-1)
        return scores


class Recorder:
    """A stopping criterion of transformers. Records tokens, log-probs and versions after each token
    of the batch, and hands over finished samples.
    """

    def __init__(self, batch: DecodeBatch, writer: Writer, loop: asyncio.AbstractEventLoop) -> None:
        self.processor = _Temperature(batch.sampling.temperature or 1.0)
        self._rows = batch.rows
        self._writer = writer
        self._loop = loop
        self._version = writer.version

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """input_ids int64 [B, L] with the new token last -> bool [B], True where the sample needs
        no more tokens.
        """
        drawn = input_ids[:, -1]
        token_ids = drawn.tolist()
        picked = self.processor.table.gather(-1, drawn[:, None])
        logprobs = picked[:, 0].tolist()
        for row, token_id, logprob in zip(self._rows, token_ids, logprobs, strict=True):
            if not row.is_done:
                self._append(row, token_id, logprob)
        # The version of the next token: new weights can only come in this call.
        self._version = self._writer.give_way()
        ends = self._writer.is_asleep
        return torch.tensor([ends or not row.is_open for row in self._rows], device=drawn.device)

    def _append(self, row: Row, token_id: int, logprob: float) -> None:
        if not row.token_ids:
            row.first_s = time.monotonic()
        row.token_ids.append(token_id)
        row.logprobs.append(logprob)
        row.versions.append(self._version)
        has_ended = token_id in self._writer.end_token_ids
        row.is_done = has_ended or len(row.token_ids) == row.request.sampling.max_new_tokens
        # The thread of a cancelled batch may outlive the event loop.
        if row.is_done and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(
                row.request.finished.put_nowait, row.completion(is_truncated=not has_ended)
            )


class ModelLock:
    """A lock whose owner can let all waiting threads go first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_waiting = 0

    def __enter__(self) -> None:
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_waiting -= 1
            self._is_taken = True

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def give_way(self) -> None:
        """Return with the lock, after all threads that waited for it. Only for its owner."""
        with self._changed:
            if not self._num_waiting:
                return
            self._is_taken = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_waiting and not self._is_taken)
            self._is_taken = True

    def wait_until_free(self) -> None:
        """Return once no thread has the lock."""
        with self:
            return
