"""The pieces in which a streamed answer, and one that a text may stop, is written. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.protocol.generator import Completed

_REPLACEMENT = "\ufffd"


def certain(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that no further token changes."""
    text = text.rstrip(_REPLACEMENT)
    longest = 0
    for stop in stops:
        for size in range(1, len(stop)):
            if text.endswith(stop[:size]):
                longest = max(longest, size)
    return text[: len(text) - longest]


def joined(parts: Sequence[Completed]) -> Completed:
    """Return consecutive pieces as one answer."""
    return Completed(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        is_truncated=parts[-1].is_truncated,
    )


def cut(written: Completed, num_kept: int) -> Completed:
    """Return the first tokens of an answer; one that is cut has no end token."""
    if num_kept == len(written.token_ids):
        return written
    return Completed(
        token_ids=written.token_ids[:num_kept],
        logprobs=written.logprobs[:num_kept],
        versions=written.versions[:num_kept],
        is_truncated=True,
    )
