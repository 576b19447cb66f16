"""An evaluation without a run: one engine with the weights of a model's directory, one verifier,
every held-out prompt once.

takes: a configuration and a model; waits for: groups, as many in flight as a generator has; gives:
the figures of an evaluation in a run Invariant: prompts, sampling, rollouts, scores and figures are
made by the code that makes them in a run. Called by `async-rl eval`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.buffer.evaluation import PromptResult, evaluation_scalars, result_of
from async_rl.config.run import RunConfig
from async_rl.config.sampling import sampling_of
from async_rl.core.errors import ConfigError, InfrastructureError, RewardError, root_cause
from async_rl.core.types import Group, Prompt, Purpose, Ticket
from async_rl.data.prompts import load_eval_prompts
from async_rl.data.tokenizer import load_tokenizer
from async_rl.generation.engine import build_engine
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.serving import listen, open_service, serve
from async_rl.rollouts.rollout import Rollouts
from async_rl.weights.directory import published
from async_rl.wire.addresses import LOOPBACK

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Alone:
    """What rollouts need of their surroundings."""

    config: RunConfig
    model_path: Path
    name: str = "eval"
    token: str = field(default_factory=secrets.token_urlsafe)
    activity: Activity = field(default_factory=Activity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standalone:
    """The figures under the names that they have in a run; num_failed: prompts that have no sample
    and do not count.
    """

    version: int
    scalars: dict[str, float]
    num_failed: int


async def evaluate(
    config: RunConfig, model_path: Path, *, version: int, on_done: Callable[[int, int], None]
) -> Standalone:
    """Evaluates the model. on_done: told prompts done, and of how many. Raises ConfigError where
    nothing is held out.
    """
    tokenizer = load_tokenizer(config, model_path)
    held_out = load_eval_prompts(config, tokenizer)
    held_out = held_out[: config.evaluation.num_prompts or len(held_out)]
    if not held_out:
        raise ConfigError("data.val_files is empty: nothing is held out; set data.val_files=<file>")
    alone = _Alone(config=config, model_path=model_path)
    stopping = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(address: str) -> None:
        url.set_result(address)

    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            open_service(config.verifiers, config.sandbox, alone.activity, config.reward)
        )
        listener = stack.enter_context(listen(LOOPBACK, 0))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(
            serve(service, listener, token=alone.token, ready=ready, stopping=stopping, log=_log),
            name="verifier",
        )
        stack.callback(stopping.set)
        engine = await asyncio.to_thread(build_engine, config, model_path)
        stack.push_async_callback(engine.close)
        await engine.start()
        with published(model_path, config.model, version) as manifest:
            await engine.load_weights(manifest)
        rollouts = Rollouts(alone, engine)
        stack.push_async_callback(rollouts.close)
        rollouts.update_verifiers([await url])
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        room = asyncio.Semaphore(config.generation.max_concurrent_groups)
        num_done = 0

        async def one(index: int, prompt: Prompt) -> PromptResult | None:
            nonlocal num_done
            async with room:
                found = await _tried(config, rollouts, index, prompt, version)
            num_done += 1
            on_done(num_done, len(held_out))
            return (
                None
                if found is None
                else result_of(prompt, found, decode, config.reward.extraction)
            )

        found = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(held_out)))
    results = [result for result in found if result is not None]
    return Standalone(
        version=version, scalars=evaluation_scalars(results), num_failed=len(found) - len(results)
    )


async def _tried(
    config: RunConfig, rollouts: Rollouts, index: int, prompt: Prompt, version: int
) -> Group | None:
    """The prompt's group; None if every attempt failed for a reason outside the policy."""
    for attempt in range(1, config.generation.max_attempts + 1):
        ticket = Ticket(
            group_id=index,
            attempt=attempt,
            purpose=Purpose.EVAL,
            prompt=prompt,
            num_samples=config.evaluation.num_samples,
            sampling=sampling_of(config, Purpose.EVAL),
            admitted_version=version,
        )
        try:
            async with asyncio.timeout(config.generation.timeout_s):
                return await rollouts.group(ticket, written=lambda: None)
        except TimeoutError:
            cause: BaseException = TimeoutError(
                f"not done after {config.generation.timeout_s:g} s (generation.timeout_s)"
            )
        except ExceptionGroup as error:
            cause = root_cause(error)
            is_outside = isinstance(cause, InfrastructureError) or (
                isinstance(cause, RewardError) and config.reward.on_failure == "drop"
            )
            if not is_outside:
                raise
        _log.warning(
            "%s, attempt %d: %s: %s", prompt.prompt_id, attempt, type(cause).__name__, cause
        )
    return None
