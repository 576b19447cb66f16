"""A scripted policy, scorer and process for the tests of rollouts."""

import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from async_rl.config.run import RunConfig
from async_rl.core.types import CodeProblem, CodeTest, Prompt, Purpose, Sampling, Score, Ticket
from async_rl.observability.activity import Activity
from async_rl.protocol.generator import Completion
from async_rl.rewards.scoring import Control
from async_rl.rollouts.conversation import SampleMaker
from async_rl.rollouts.rollout import Rollouts


class Alphabet:
    """Token k is the k-th letter; 0 ends and is no text."""

    chat_template = None
    eos_token = ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + int(i)) for i in ids if i)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text if letter.isalpha()]}


def completion(
    *ids: int, index: int = 0, logprob: float = 0.0, version: int = 0, is_truncated: bool = False
) -> Completion:
    return Completion(
        index=index,
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), logprob, np.float32),
        versions=np.full(len(ids), version, np.int32),
        is_truncated=is_truncated,
    )


class Parrot:
    """Turn k of a sample is the letter u + k and an end, written by version 3 + k; it notes all
    tokens that came before, and its limits.
    """

    version = 3

    def __init__(self) -> None:
        self.before: dict[str, list[int]] = {}
        self.limits: list[int] = []

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        assert num_samples == 1
        self.before[request_id] = list(prompt_token_ids)
        self.limits.append(sampling.max_new_tokens)
        # 1.1.0/2.0 is the third call of an agent, 1.1.0.2 the third turn of a conversation.
        found = re.match(r"\d+\.\d+\.-?\d+[./](\d+)", request_id)
        assert found is not None
        turn = int(found[1])
        ids = [21 + turn, 0][: sampling.max_new_tokens]
        yield completion(*ids, logprob=-0.5 - turn, version=3 + turn, is_truncated=len(ids) < 2)


class Judge:
    """Gives every sample the reward 1 and keeps it."""

    def __init__(self) -> None:
        self.samples: list[Any] = []

    @property
    def texts(self) -> list[str]:
        return [sample.response for sample in self.samples]

    async def score(self, prompt: Prompt, text: str, sample: Any) -> Score:
        self.samples.append(sample())
        assert self.samples[-1].response == text
        return score(1.0)

    async def close(self) -> None:
        pass


def score(reward: float, **more: Any) -> Score:
    return Score(reward=reward, parts={}, verdicts=(), latency_s=0.0, **more)


def ticket_of(
    num_samples: int,
    purpose: Purpose = Purpose.TRAIN,
    *,
    tests: Sequence[CodeTest] = (),
    row: str = "{}",
    prompt_id: str = "p",
    max_new_tokens: int = 30,
) -> Ticket:
    """A ticket of the prompt "ab"."""
    return Ticket(
        group_id=1,
        attempt=1,
        purpose=purpose,
        num_samples=num_samples,
        admitted_version=3,
        prompt=Prompt(
            prompt_id=prompt_id,
            text="ab",
            token_ids=np.array([1, 2], np.int32),
            data_source="code",
            problem=CodeProblem(tests=list(tests), row=row),
        ),
        sampling=Sampling(temperature=1.0, max_new_tokens=max_new_tokens),
    )


@contextlib.asynccontextmanager
async def opened_rollouts(
    config: RunConfig, scorer: object, *, maker: SampleMaker | None = None, activity: Any = None
) -> AsyncIterator[Rollouts]:
    """Rollouts whose samples `scorer` scores."""
    rollouts = Rollouts(
        config,
        tokenizer=Alphabet(),
        token="t",
        name="generator-0",
        activity=activity or Activity(),
        maker=maker,
    )
    rollouts.scorer = cast(Any, scorer)
    rollouts.control = Control(cast(Any, scorer), limit_s=1.0)
    try:
        yield rollouts
    finally:
        await rollouts.close()


def process(config: RunConfig, call: Callable[..., Awaitable[Any]], **more: Any) -> Any:
    """The context of a generator whose calls of the buffer are answered by `call`."""
    return SimpleNamespace(
        **{
            "config": config,
            "model_path": None,
            "token": "t",
            "name": "generator-0",
            "incarnation": "a",
            "version": 0,
            "life": 1,
            "activity": Activity(),
            "log": logging.getLogger("test"),
            "call_buffer": call,
            **more,
        }
    )
