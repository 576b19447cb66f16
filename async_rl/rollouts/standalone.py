"""An evaluation without a run: one engine, one verifier, every held-out prompt once.

takes: a configuration and the directory of a model
waits for: groups, as many in flight as in a generator
returns: the metrics of an evaluation in a run

Invariant: prompts, sampling, rollouts, scores and metrics come from the code that a run uses.
"""

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import torch

from async_rl.buffer.evaluation import evaluation_scalars, result_of
from async_rl.config.generation import ModelConfig
from async_rl.config.run import RunConfig
from async_rl.config.sampling import sampling_of
from async_rl.core.errors import ConfigError, InfrastructureError, RewardError, root_cause
from async_rl.core.types import Group, Prompt, Purpose, Ticket
from async_rl.data.prompts import held_out_prompts
from async_rl.data.tokenizer import load_tokenizer
from async_rl.generation.engine import Engine
from async_rl.generation.opener import engine_opener
from async_rl.observability.activity import Activity
from async_rl.protocol.weights import Manifest
from async_rl.rewards.verifier.server import serve
from async_rl.rewards.verifier.service import open_service
from async_rl.rollouts.conversation import open_conversations
from async_rl.rollouts.rollout import Rollouts
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec
from async_rl.wire.addresses import LOOPBACK
from async_rl.wire.http import listen

_log = logging.getLogger(__name__)


async def evaluate(
    config: RunConfig, model_path: Path, *, version: int, on_done: Callable[[int, int], None]
) -> tuple[dict[str, float], int]:
    """Evaluate the model. Return the metrics, under the names that they have in a run, and the
    number of prompts without a sample, which do not count. Raises ConfigError without held-out
    prompts.

    on_done: called with the number of finished prompts and of all prompts.
    """
    tokenizer = load_tokenizer(config, model_path)
    held_out = held_out_prompts(config, tokenizer)
    if not held_out:
        raise ConfigError("data.val_files is empty: nothing is held out; set data.val_files=<file>")
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    async with AsyncExitStack() as stack:
        rollouts, engine = await _open_rollouts(config, model_path, tokenizer, version, stack)
        # More groups in flight would only wait inside the engine, and their time limits would run.
        slots = asyncio.Semaphore(config.generation.max_concurrent_groups)
        num_done = 0

        async def one(index: int, prompt: Prompt) -> dict[str, float] | None:
            nonlocal num_done
            async with slots:
                group = await _attempt(config, rollouts, engine, index, prompt)
            num_done += 1
            on_done(num_done, len(held_out))
            if group is None:
                return None
            return result_of(prompt, group, decode, config.reward.extraction)

        outcomes = await asyncio.gather(
            *(one(index, prompt) for index, prompt in enumerate(held_out))
        )
    results = [result for result in outcomes if result is not None]
    return evaluation_scalars(results), len(held_out) - len(results)


async def _open_rollouts(
    config: RunConfig, model_path: Path, tokenizer: object, version: int, stack: AsyncExitStack
) -> tuple[Rollouts, Engine]:
    """Start a verifier and an engine with the model's weights; the stack closes them."""
    activity = Activity()
    # The verifier serves on loopback, where any user of the machine can connect.
    token = secrets.token_urlsafe()
    stopping = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(address: str) -> None:
        url.set_result(address)

    service = await stack.enter_async_context(open_service(config, activity, has_functions=True))
    listener = stack.enter_context(listen(LOOPBACK, 0))
    group = await stack.enter_async_context(asyncio.TaskGroup())
    serving = serve(service, listener, token=token, ready=ready, stopping=stopping, log=_log)
    group.create_task(serving, name="verifier")
    stack.callback(stopping.set)
    # It blocks for seconds; the verifier starts during that time.
    open_engine = await asyncio.to_thread(engine_opener, config, model_path)
    engine = await open_engine()
    stack.push_async_callback(engine.close)
    with _published(model_path, config.model, version) as manifest:
        await engine.load_weights(manifest)
    rollouts = Rollouts(
        config,
        tokenizer=tokenizer,
        token=token,
        name="eval",
        activity=activity,
        maker=open_conversations(config, tokenizer),
    )
    stack.push_async_callback(rollouts.close)
    rollouts.client.update_servers([await url])
    return rollouts, engine


async def _attempt(
    config: RunConfig, rollouts: Rollouts, engine: Engine, index: int, prompt: Prompt
) -> Group | None:
    """Return the prompt's group; None if every attempt failed for a reason outside the policy."""
    limit_s = config.timeouts.longest_group_s(config.data.max_response_tokens)
    # As in a run, where the buffer issues the ticket again.
    for attempt in range(1, config.generation.max_attempts + 1):
        ticket = Ticket(
            group_id=index,
            attempt=attempt,
            purpose=Purpose.EVAL,
            prompt=prompt,
            num_samples=config.evaluation.num_samples,
            sampling=sampling_of(config, Purpose.EVAL),
            admitted_version=engine.version,
        )
        try:
            async with asyncio.timeout(limit_s):
                return await rollouts.group(ticket, engine, written=lambda: None)
        except TimeoutError:
            problem = f"not done after {limit_s:g} s (timeouts.group_s)"
        except ExceptionGroup as error:
            cause = root_cause(error)
            is_dropped = (InfrastructureError, RewardError)
            stops = isinstance(cause, RewardError) and "function_failure" in config.reward.stop_on
            if stops or not isinstance(cause, is_dropped):
                raise
            problem = f"{type(cause).__name__}: {cause}"
        _log.warning("%s, attempt %d: %s", prompt.prompt_id, attempt, problem)
    return None


@contextmanager
def _published(path: Path, model: ModelConfig, version: int) -> Iterator[Manifest]:
    """Share all parameters of the model, tied ones once, with engines of this host inside the
    block.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=getattr(torch, model.dtype),
        trust_remote_code=model.trust_remote_code,
        local_files_only=True,
    )
    parameters = dict(loaded.named_parameters())
    specs = [tensor_spec(name, tensor) for name, tensor in parameters.items()]
    with SharedTensors(specs) as block:
        yield block.write(version, parameters.values())
