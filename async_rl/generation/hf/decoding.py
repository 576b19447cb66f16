"""The samples of one request of the transformers engine, which are written token by token."""

import math
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from async_rl.batching.support import Grammars, Walk, spans_of, truncate
from async_rl.core.calls import EVERYTHING
from async_rl.core.types import IntArray, Sampling
from async_rl.protocol.generator import Completion, Scores


class Samples:
    """Samples of one prompt, all with the same number of tokens. A finished sample is computed
    further until the last one is complete; these tokens are dropped.

    unfinished: the samples that need more tokens. cache: keys and values of all tokens but the
    newest; None = they are computed again.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        num_samples: int,
        sampling: Sampling,
        end_token_ids: Sequence[int],
        grammars: Grammars,
        *,
        generator: torch.Generator,
    ) -> None:
        self._sampling = sampling
        self._end_token_ids = end_token_ids
        # Samples without limits need no walk, which passes over the vocabulary at each token.
        num_walks = 0 if sampling.support == EVERYTHING else num_samples
        self._walks = [Walk(sampling.support, end_token_ids, grammars) for _ in range(num_walks)]
        self._kept: list[list[IntArray]] = []
        """The tokens that remained, at each position of each sample."""
        self._generator = generator
        self._num_prompt = len(prompt)
        self._ids = torch.tensor([prompt] * num_samples, device=generator.device)
        self._logprobs = torch.empty(num_samples, 0)
        self._likeliest: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The ids and the log-probs of the likeliest tokens, at each position [num_samples, K]."""
        self._prompt: Scores | None = None
        self._versions: list[int] = []
        self._first_s = math.nan
        self.unfinished = set(range(num_samples))
        self.cache: Any = None

    @torch.no_grad()
    def write(self, model: Any, version: int) -> list[Completion]:
        """Write one token of each sample; return the samples that it finishes.

        version: of the model's weights.
        """
        new = self._ids if self.cache is None else self._ids[:, -1:]
        wanted = self._sampling.alternatives
        is_scored = wanted.num_prompt_top is not None and not self._versions
        # Only the last logits: those of a whole prompt may be larger than the model.
        output = model(
            new, past_key_values=self.cache, use_cache=True, logits_to_keep=0 if is_scored else 1
        )
        if is_scored:
            self._prompt = scores_of(self._ids[0], output.logits[0], wanted.num_prompt_top or 0)
        self.cache = output.past_key_values
        # Temperature 0 takes the largest logit, with the log-prob at temperature 1.
        logits = output.logits[:, -1].float()
        if self._walks:
            added = np.stack([walk.added() for walk in self._walks])
            logits = logits + torch.from_numpy(added).to(logits.device)
        logits = logits / (self._sampling.temperature or 1.0)
        support = self._sampling.support
        if self._sampling.temperature and support.is_truncated:
            logits = truncate(logits, support.top_k, support.top_p)
            rows = (logits > -torch.inf).cpu().numpy()
            self._kept.append([row.nonzero()[0].astype(np.int32) for row in rows])
        table = logits.log_softmax(-1)
        if self._sampling.temperature:
            drawn = torch.multinomial(table.exp(), 1, generator=self._generator)
        else:
            drawn = table.argmax(-1, keepdim=True)
        self._ids = torch.cat([self._ids, drawn], 1)
        self._logprobs = torch.cat([self._logprobs, table.gather(-1, drawn).cpu()], 1)
        if wanted.num_top:
            largest = table.topk(wanted.num_top)
            self._likeliest.append((largest.indices, largest.values))
        for walk, token_id in zip(self._walks, drawn[:, 0].tolist(), strict=False):
            walk.accept(token_id)
        if not self._versions:
            self._first_s = time.monotonic()
        self._versions.append(version)
        is_last = len(self._versions) == self._sampling.max_new_tokens
        ended = [index for index in self.unfinished if int(drawn[index, 0]) in self._end_token_ids]
        finished = sorted(self.unfinished) if is_last else ended
        self.unfinished -= set(finished)
        return [self._completion(index, is_truncated=index not in ended) for index in finished]

    def _completion(self, index: int, *, is_truncated: bool) -> Completion:
        kept = [samples[index] for samples in self._kept]
        likeliest = None
        if self._likeliest:
            columns = zip(*self._likeliest, strict=True)
            likeliest = _scores(*(torch.stack([part[index] for part in it]) for it in columns))
        return Completion(
            spans=spans_of(self._sampling.support, len(self._versions), self._end_token_ids, kept),
            index=index,
            token_ids=self._ids[index, self._num_prompt :].cpu().numpy().astype(np.int32),
            logprobs=self._logprobs[index].numpy(),
            versions=np.array(self._versions, np.int32),
            is_truncated=is_truncated,
            first_s=self._first_s,
            likeliest=likeliest,
            prompt=self._prompt,
        )


def scores_of(row: torch.Tensor, logits: torch.Tensor, num_top: int) -> Scores:
    """Return the log-probs at temperature 1 of each token of a row and of the likeliest tokens at
    its position, as in `Completion.prompt`. row: int64 [L]; logits: [L, V].
    """
    table = logits[:-1].float().log_softmax(-1)
    ids = torch.cat([row[1:, None], table.topk(num_top).indices], 1)
    # A first row: nothing predicts the first token.
    first = (0, 0, 1, 0)
    return _scores(pad(ids, first), pad(table.gather(-1, ids), first, value=torch.nan))


def _scores(ids: torch.Tensor, logprobs: torch.Tensor) -> Scores:
    return Scores(ids=ids.int().cpu().numpy(), logprobs=logprobs.cpu().numpy())


def seed_of(request_id: str, seed: int) -> int:
    """Return the seed of a request, which does not depend on the attempt to generate its group. So
    a resumed run repeats itself.

    request_id: the group, the attempt, and the rest, with points between them.
    """
    group, _, rest = request_id.partition(".")
    # hash() of a text differs between processes.
    return zlib.crc32(f"{seed} {group} {rest.partition('.')[2]}".encode())
