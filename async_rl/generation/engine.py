"""The interface of every generation engine.

Invariants
- Token ids go in and come out; no engine sees text.
- Each token comes with the float32 log-prob of the distribution it was drawn from and the version
  of the weights that sampled it.
- Before the first `load_weights` the engine has no version and generates no tokens.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from async_rl.core.errors import ConfigError, WeightsError
from async_rl.core.frozen import frozen
from async_rl.core.types import NO_VERSION, FloatArray, IntArray, Sampling
from async_rl.protocol.generator import Completion, LoadReport
from async_rl.protocol.service import Sample, Sampled
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source


class Generates(Protocol):
    """Continues rows of tokens: an engine, or the generators of a run."""

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield each of num_samples completions of one prompt as it finishes; closing the iterator
        cancels the rest.

        Raises WeightsError before the first load and after a failed one, Unavailable if the engine
        died.
        """


async def one_completion(
    engine: Generates, request_id: str, token_ids: IntArray, sampling: Sampling
) -> Completion:
    """Return the engine's continuation of one row of tokens, int32 [N]."""
    # The list is not a variable here: a collection of garbage would visit each of its entries, of
    # hundreds of calls in flight.
    completions = engine.generate(request_id, token_ids.tolist(), 1, sampling)
    async with contextlib.aclosing(completions):
        return await anext(completions)


class Engine(Generates, Protocol):
    """Generates tokens with weights that may change between two tokens. `engine_opener`
    starts one.
    """

    @property
    def version(self) -> int:
        """Version of the current weights; NO_VERSION before the first load."""

    async def close(self) -> None:
        """End the engine; requests in flight fail. Safe to call twice."""

    async def sleep(self) -> None:
        """Stop after the current step and release the device: weights and cache; requests in flight
        are kept.

        The next `load_weights` wakes it: requests continue from the tokens that they have. Safe to
        call twice.
        """

    async def weight_devices(self) -> list[str]:
        """The devices that receive a broadcast, one per rank: `cpu`, or the UUID of a GPU."""

    async def load_weights(self, manifest: Manifest, source: Source = SHARED_BLOCK) -> LoadReport:
        """Change the weights between two engine steps; requests in flight continue.

        Raises WeightsError: if the shared block does not match the manifest, nothing
        has changed; after any other WeightsError the engine refuses all further work. Raises
        BroadcastBroken if a broadcast stopped early: the load may be repeated. Until then the
        engine continues with the old weights, or stays paused if it loads in place.
        """

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Return the float32 log-prob of each token of each row at temperature 1, given the tokens
        before it; 0 for the first.
        """


class Serves(Engine, Protocol):
    """An engine of the training service, or one of its slots."""

    @property
    def places(self) -> Sequence[Serves]:
        """The slots for adapters whose weights may change during a sample."""

    async def sample(self, request: Sample) -> Sampled:
        """Draw the sequences of a request. Raises DataError for a request that cannot be served,
        Unavailable if the engine died.
        """


OpenEngine = Callable[[], Awaitable[Engine]]
"""Starts an engine. Raises ConfigError if it refuses the settings or the model."""


@frozen
class ModelFacts:
    """Facts that the engines read from the model's directory."""

    max_positions: int
    end_token_ids: tuple[int, ...]


def read_model_facts(model_path: Path) -> ModelFacts:
    """Read config.json and generation_config.json of a directory that has been checked
    (data/model_files.py). Raises ConfigError if they name no end-of-sequence token.
    """
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    generation_path = model_path / "generation_config.json"
    generation: dict[str, Any] = (
        json.loads(generation_path.read_text()) if generation_path.exists() else {}
    )
    # generation_config.json wins, as in transformers: chat models end with another token than their
    # base.
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    if ends is None:
        raise ConfigError(
            f"neither config.json nor generation_config.json in {model_path} names eos_token_id, so"
            " no sample could end; add it"
        )
    # Models for images and text nest the configuration of the language model.
    text_config = config.get("text_config", config)
    return ModelFacts(
        max_positions=int(text_config.get("max_position_embeddings", 1 << 30)),
        end_token_ids=tuple(ends) if isinstance(ends, list) else (int(ends),),
    )


def require_version(version: int) -> None:
    """Raise WeightsError before the first load."""
    if version == NO_VERSION:
        raise WeightsError(
            "the engine has no version of the weights yet; push one before requesting tokens"
        )


def seed_of(request_id: str, seed: int) -> int:
    """Return the seed of a request, which does not depend on the attempt to generate its group. So
    a resumed run repeats itself.

    request_id: the group, the attempt, and the rest, with points between them.
    """
    group, _, rest = request_id.partition(".")
    # hash() of a text differs between processes.
    return zlib.crc32(f"{seed} {group} {rest.partition('.')[2]}".encode())
