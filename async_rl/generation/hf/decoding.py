"""One batch of the transformers engine: what each sample has written, and whose turn the model's
use is.

Used by hf_engine.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from async_rl.core.errors import Unavailable
from async_rl.core.types import Sampling
from async_rl.generation.engine import Completion


class Writer(Protocol):
    """What a batch asks of its engine."""

    @property
    def version(self) -> int:
        """Version of the weights that write now."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sample."""

    @property
    def is_asleep(self) -> bool:
        """Whether the batch is to end after this token, unfinished samples and all; they are
        written on later.
        """

    def give_way(self) -> int:
        """Called between two tokens: lets others have the model; the version that writes from now
        on.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and where its completions go; an error there ends it."""

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
        self.is_done = False

    def completion(self, *, is_truncated: bool) -> Completion:
        """What it has written."""
        return Completion(
            index=self.index,
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            is_truncated=is_truncated,
        )


class _Temperature(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Divides the logits and keeps the log-probs that the next token is drawn from. The last
    processor: generate adds none after it.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self.table = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] -> float32 [B, V], the logits drawn from."""
        scores = scores.float() / self._temperature
        self.table = scores.log_softmax(-1)
        return scores


class Recorder(StoppingCriteria):  # type: ignore[misc]
    """Called by generate after each token of the batch: writes down tokens, log-probs and versions,
    hands over what is finished.
    """

    def __init__(self, rows: list[Row], writer: Writer, loop: asyncio.AbstractEventLoop) -> None:
        self.processor = _Temperature(rows[0].request.sampling.temperature or 1.0)
        self._rows = rows
        self._writer = writer
        self._loop = loop
        self._version = writer.version

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """input_ids int64 [B, L] with the new token last -> bool [B], True where the sample needs
        no more tokens.
        """
        drawn = input_ids[:, -1]
        token_ids = drawn.tolist()
        logprobs = self.processor.table.gather(-1, drawn[:, None])[:, 0].tolist()
        for row, token_id, logprob in zip(self._rows, token_ids, logprobs, strict=True):
            if not row.is_done:
                self._append(row, token_id, logprob)
        self._version = self._writer.give_way()
        ends = self._writer.is_asleep
        return torch.tensor(
            [ends or row.is_done or row.request.is_aborted for row in self._rows],
            device=input_ids.device,
        )

    def _append(self, row: Row, token_id: int, logprob: float) -> None:
        row.token_ids.append(token_id)
        row.logprobs.append(logprob)
        row.versions.append(self._version)
        is_ended = token_id in self._writer.end_token_ids
        row.is_done = is_ended or len(row.token_ids) == row.request.sampling.max_new_tokens
        if row.is_done and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(
                row.request.finished.put_nowait, row.completion(is_truncated=not is_ended)
            )


class Turn:
    """Whose turn it is to use the model: a lock whose holder can let everybody who waits go first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_waiting = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits for the turn and keeps it."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_waiting -= 1
            self._is_taken = True
        try:
            yield
        finally:
            self._release()

    def give_way(self) -> None:
        """Called by the holder: returns with the turn, after all who waited for it."""
        with self._changed:
            if not self._num_waiting:
                return
            self._is_taken = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_waiting and not self._is_taken)
            self._is_taken = True

    def wait_until_free(self) -> None:
        """Returns once nobody holds the turn."""
        with self.held():
            return

    def _release(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()
