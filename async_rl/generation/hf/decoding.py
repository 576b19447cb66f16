"""One batch of the transformers engine: its samples, and the lock that its model is used under."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from async_rl.core.errors import Unavailable
from async_rl.core.types import Sampling
from async_rl.protocol.generator import Completion


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
        self.sampling = requests[0].sampling
        self._table = torch.empty(0)
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
        # hash() of a text differs between processes.
        return zlib.crc32(f"{seed} {groups}{num_written if any(num_written) else ''}".encode())

    def temper(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A logits processor of transformers: scores [B, V] -> float32 [B, V], the logits that the
        next token is drawn from. It is the last one: `generate` adds none after it.
        """
        # Temperature 0 takes the largest logit, with the log-prob at temperature 1.
        scores = scores.float() / (self.sampling.temperature or 1.0)
        self._table = scores.log_softmax(-1)
        return scores

    def record(
        self, drawn: torch.Tensor, version: int, end_token_ids: Sequence[int]
    ) -> list[tuple[Request, Completion]]:
        """Add the newest token of each sample, int64 [B]; return the samples that it finishes."""
        logprobs = self._table.gather(-1, drawn[:, None])[:, 0].tolist()
        finished = []
        for row, token_id, logprob in zip(self.rows, drawn.tolist(), logprobs, strict=True):
            # transformers pads a finished sample while other samples continue.
            if row.is_done:
                continue
            if not row.token_ids:
                row.first_s = time.monotonic()
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
            row.versions.append(version)
            has_ended = token_id in end_token_ids
            row.is_done = has_ended or len(row.token_ids) == self.sampling.max_new_tokens
            if row.is_done:
                finished.append((row.request, row.completion(is_truncated=not has_ended)))
        return finished


class ModelLock:
    """A lock whose owner can let a waiting thread go first."""

    def __init__(self) -> None:
        self._model = threading.Lock()
        # The waiting thread that is next has it, so the owner that gives way comes after that one.
        self._turn = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._model.acquire()

    def __exit__(self, *_: object) -> None:
        self._model.release()

    def give_way(self) -> None:
        """Return with the lock, after a thread that waited for it. Only for its owner."""
        self._model.release()
        self.__enter__()
