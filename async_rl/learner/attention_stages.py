"""The parts of a packed row's attention on a CPU, chosen by the lengths of its segments.

Only this file pads tokens.
Invariant: memory is linear in the tokens of the row for any lengths, prompts and windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.packing import Indices
from async_rl.learner.attention_parts import Part, PartsAttention, Stage

# A row shorter than this share of its part's longest starts a new part. Below it, padding costs
# more than another kernel call.
_MIN_FILL = 0.6

# Tokens of a prompt and response that are one row of a part, under a mask. For short ones a second
# call and the merge cost 10 percent of a step of the embedded model; longer masks cost more.
_JOINED_KEYS = 256

# Queries of a windowed part at most: its keys are the window and as many more.
_WINDOW_QUERIES = 512

# Keys of all rows of a windowed part at most. Its rows repeat keys, which would otherwise add up to
# several times the row.
_WINDOW_KEYS = 16384


class PartsPlan:
    """The attention of one packed row on a CPU. A window is planned for the first layer that has
    it.
    """

    def __init__(self, segments: Indices, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        self._longest = int((segments[:, 1] + segments[:, 3]).max())
        self._full = _stages(segments, None, device)
        self._windowed: dict[int, list[Stage]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `attention.attend` of the row."""
        out: Tensor = PartsAttention.apply(query, key, value, self._stages(window), scaling)  # type: ignore[no-untyped-call]
        return out

    def _stages(self, window: int | None) -> list[Stage]:
        if window is None or window >= self._longest:
            return self._full
        if window not in self._windowed:
            self._windowed[window] = _stages(self._segments, window, self._device)
        return self._windowed[window]


def _stages(segments: Indices, window: int | None, device: torch.device) -> list[Stage]:
    """Plan the parts of a row: those with each segment's own keys, and shared prompts."""
    starts, lengths, prompt_starts, prompt_lengths = segments.T.tolist()
    whole: list[Row] = []
    joined: list[Row] = []
    windowed: list[tuple[Indices, Indices, int]] = []
    users: dict[int, list[Indices]] = {}
    prompts: dict[int, Indices] = {}
    for start, length, first, size in zip(
        starts, lengths, prompt_starts, prompt_lengths, strict=True
    ):
        own, prompt = np.arange(start, start + length), np.arange(first, first + size)
        if window is not None and size + length > window:
            windowed += _windowed_rows(own, prompt, window)
        elif size and size + length <= _JOINED_KEYS:
            joined.append((own, prompt))
        else:
            whole.append((own, own))
            if size:
                prompts[first] = prompt
                users.setdefault(first, []).append(own)
    num_tokens = sum(lengths)
    groups = [(_causal_part(rows, device), rows) for rows in _similar(whole)]
    groups += [(_joined_part(rows, device), rows) for rows in _similar(joined)]
    groups += _windowed_parts(windowed, window or 0, device)
    stages = [_stage(groups, num_tokens, device, repeats_keys=bool(joined or windowed))]
    if users:
        shared = [(np.concatenate(users[first]), prompts[first]) for first in users]
        groups = [(_prompt_part(rows, device), rows) for rows in _similar(shared)]
        stages.append(_stage(groups, num_tokens, device, repeats_keys=False))
    return stages


Row = tuple[Indices, Indices]
"""The queries and the keys of a row of a part; a joined row has the keys of its prompt only."""


def _similar(rows: Sequence[Row]) -> list[list[Row]]:
    """Sort rows by size into groups of similar ones."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (-len(row[0]), -len(row[1]))):
        if groups:
            first = groups[-1][0]
            few, many = sorted((len(row[1]), len(first[1])))
            if len(row[0]) >= _MIN_FILL * len(first[0]) and few >= _MIN_FILL * many:
                groups[-1].append(row)
                continue
        groups.append([row])
    return groups


def _stage(
    groups: Sequence[tuple[Part, Sequence[Row]]],
    num_tokens: int,
    device: torch.device,
    *,
    repeats_keys: bool,
) -> Stage:
    query_cells, has_all_queries = _cells([[q for q, _ in rows] for _, rows in groups], num_tokens)
    key_cells, has_all_keys = None, False
    if not repeats_keys:
        cells, has_all_keys = _cells([[k for _, k in rows] for _, rows in groups], num_tokens)
        key_cells = torch.from_numpy(cells).to(device)
    return Stage(
        parts=tuple(part for part, _ in groups),
        query_cells=torch.from_numpy(query_cells).to(device),
        key_cells=key_cells,
        has_all_queries=has_all_queries,
        has_all_keys=has_all_keys,
    )


def _cells(groups: Sequence[Sequence[Indices]], num_tokens: int) -> tuple[Indices, bool]:
    """Return the cell of each token among padded rows, and True if every token has one."""
    total = sum(len(group) * max(map(len, group)) for group in groups)
    cells = np.full(num_tokens, total)
    first = 0
    for group in groups:
        longest = max(map(len, group))
        for tokens in group:
            cells[tokens] = np.arange(first, first + len(tokens))
            first += longest
    return cells, bool((cells < total).all())


def _padded(rows: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Return int64 [N, L] and the cells that are padding: they repeat the row's first token."""
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    index = np.repeat(np.array([row[0] for row in rows])[:, None], lengths.max(), 1)
    index[is_real] = np.concatenate(rows)
    return index, np.flatnonzero(~is_real)


def _causal_part(rows: Sequence[Row], device: torch.device) -> Part:
    """Segments that attend to themselves. Padding at the end is seen by padding only."""
    index, padding = (torch.from_numpy(x).to(device) for x in _padded([q for q, _ in rows]))
    return Part(
        num_rows=len(rows),
        query_index=index.flatten(),
        key_index=index.flatten(),
        padding=padding,
        is_causal=True,
    )


def _prompt_part(rows: Sequence[Row], device: torch.device) -> Part:
    """Responses that attend to the whole prompt that they share."""
    queries, padding = (torch.from_numpy(x).to(device) for x in _padded([q for q, _ in rows]))
    keys, unseen = (torch.from_numpy(x).to(device) for x in _padded([k for _, k in rows]))
    bias = None
    if len(unseen):
        bias = torch.zeros(keys.numel(), device=device).index_fill_(0, unseen, -torch.inf)
        bias = bias.view(len(rows), 1, 1, -1)
    return Part(
        num_rows=len(rows),
        query_index=queries.flatten(),
        key_index=keys.flatten(),
        padding=padding,
        is_causal=False,
        bias=bias,
    )


def _joined_part(rows: Sequence[Row], device: torch.device) -> Part:
    """Short responses that attend to their prompt and, causally, to themselves."""
    queries, padding = (torch.from_numpy(x).to(device) for x in _padded([q for q, _ in rows]))
    prompts, unseen = (torch.from_numpy(x).to(device) for x in _padded([k for _, k in rows]))
    size = queries.shape[1]
    of_prompt = torch.zeros(prompts.numel(), device=device).index_fill_(0, unseen, -torch.inf)
    later = torch.full((size, size), -torch.inf, device=device).triu_(1)
    bias = torch.cat(
        [
            of_prompt.view(len(rows), 1, 1, -1).expand(-1, -1, size, -1),
            later.expand(len(rows), 1, -1, -1),
        ],
        dim=-1,
    )
    return Part(
        num_rows=len(rows),
        query_index=queries.flatten(),
        key_index=torch.cat([prompts, queries], 1).flatten(),
        padding=padding,
        is_causal=False,
        bias=bias,
    )


def _windowed_rows(
    own: Indices, prompt: Indices, window: int
) -> list[tuple[Indices, Indices, int]]:
    """Divide a segment into rows of queries with the keys they see, and the position of the first
    query among the keys.
    """
    sequence = np.concatenate([prompt, own])
    size = min(_WINDOW_QUERIES, max(16, window))
    rows = []
    for first in range(len(prompt), len(sequence), size):
        last = min(first + size, len(sequence))
        oldest = max(0, first - window + 1)
        rows.append((sequence[first:last], sequence[oldest:last], first - oldest))
    return rows


def _windowed_parts(
    rows: Sequence[tuple[Indices, Indices, int]], window: int, device: torch.device
) -> list[tuple[Part, list[Row]]]:
    """Rows of equal shape share a kernel call and its mask."""
    shapes: dict[tuple[int, int, int], list[Row]] = {}
    for queries, keys, first in rows:
        shapes.setdefault((len(queries), len(keys), first), []).append((queries, keys))
    parts = []
    for (_, num_keys, first), members in shapes.items():
        most = max(1, _WINDOW_KEYS // num_keys)
        for begin in range(0, len(members), most):
            some = members[begin : begin + most]
            query_index, key_index = (
                torch.from_numpy(np.concatenate(x)).to(device) for x in zip(*some, strict=True)
            )
            part = Part(
                num_rows=len(some),
                query_index=query_index,
                key_index=key_index,
                padding=query_index[:0],
                is_causal=False,
                window=(window, first),
            )
            parts.append((part, some))
    return parts
