"""Log-probs of answers and prompts, as the APIs of OpenAI and vLLM write them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from async_rl.protocol.generator import Completion, Scores
from async_rl.sessions.errors import Json

# JSON has no -inf, which a token outside of the support has.
_LEAST = -9999.0
Name = Callable[[int], str]
"""Returns the text of a token."""


def named(token: int, name: Name) -> Json:
    """Return a token as chat completions and responses name it."""
    text = name(token)
    return {"token": text, "bytes": list(text.encode())}


def content(written: Completion, named: Callable[[int], Json]) -> list[Json]:
    """Return the tokens of an answer with their alternatives. named: the fields of a token."""
    return [
        {
            **named(token),
            "logprob": logprob,
            "top_logprobs": [{**named(other), "logprob": value} for other, value in top],
        }
        for token, logprob, top in zip(*_columns(written), strict=True)
    ]


def by_text(written: Completion, name: Name) -> Json:
    """Return the log-probs of /v1/completions, whose alternatives contain the token itself."""
    ids, logprobs, tops = _columns(written)
    tokens = [name(token) for token in ids]
    tops = [
        {token: logprob, **{name(other): value for other, value in top}}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": None if written.likeliest is None else tops,
        "text_offset": np.cumsum([0, *map(len, tokens)])[:-1].tolist(),
    }


def of_prompt(written: Completion, name: Name) -> Json:
    """Return the field with the log-probs of the prompt; without them none."""
    if written.prompt is None:
        return {}
    positions: list[Json | None] = [None]
    for (token, logprob), *top in list(_pairs(written.prompt))[1:]:
        ranked = [(token, logprob, None), *((*each, rank) for rank, each in enumerate(top, 1))]
        positions.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": name(token)}
                for token, logprob, rank in ranked
            }
        )
    return {"prompt_logprobs": positions}


def _columns(written: Completion) -> tuple[list[int], list[float], Sequence[Any]]:
    tops: Sequence[Any] = [()] * len(written.token_ids)
    if written.likeliest is not None:
        tops = list(_pairs(written.likeliest))
    return written.token_ids.tolist(), written.logprobs.tolist(), tops


def _pairs(scores: Scores) -> Iterator[list[tuple[int, float]]]:
    """Yield the tokens of each position with their log-probs."""
    logprobs = np.maximum(scores.logprobs, _LEAST).tolist()
    for ids, values in zip(scores.ids.tolist(), logprobs, strict=True):
        yield list(zip(ids, values, strict=True))
