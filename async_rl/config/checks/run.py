"""Checks of several settings together: combinations that cannot work, or that leave one setting
without effect, are refused before any process starts.

Invariants: each problem is one line with path=value, the reason and the remedy; all problems are
reported together; these checks read the configuration alone, `machine.py` reads the machine too.
"""

from collections.abc import Iterable, Iterator

from async_rl.config.checks.algorithm import algorithm_problems
from async_rl.config.checks.placement import placement_problems
from async_rl.config.checks.pools import pool_problems
from async_rl.config.checks.reward import reward_problems
from async_rl.config.checks.sections import (
    file_problems,
    launcher_problems,
    service_problems,
    step_problems,
    weights_problems,
)
from async_rl.config.checks.vllm_extra import extra_problems
from async_rl.config.generation import ENGINES
from async_rl.config.plugins import ENGINE, is_plugin
from async_rl.config.pool_sizes import in_words_of
from async_rl.config.pools import config_of, generator_pools
from async_rl.config.rewards import MOST_TIMEOUTS
from async_rl.config.run import RunConfig
from async_rl.config.sampling import support_of
from async_rl.core.errors import ConfigError
from async_rl.core.support import MOST_KEPT


def check(config: RunConfig) -> None:
    """Raise ConfigError with one line per problem if settings contradict each other."""
    raise_if_any(problems(config))


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise ConfigError with the problems, one per line, if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def problems(config: RunConfig) -> Iterator[str]:
    """Yield all contradictions within a configuration."""
    yield from _run(config)
    yield from _data(config)
    yield from _sampling(config)
    yield from pool_problems(config)
    # A pool inherits settings, and with them problems of the main pool: report each once.
    yield from dict.fromkeys(_generators(config))
    yield from _batch(config)
    yield from _shards(config)
    yield from algorithm_problems(config)
    yield from reward_problems(config)
    yield from service_problems(config)
    yield from _optimizers(config)
    yield from weights_problems(config)
    yield from _timeouts(config)
    yield from launcher_problems(config)
    yield from placement_problems(config)


def _run(config: RunConfig) -> Iterator[str]:
    if config.network.host in ("0.0.0.0", "::", "*"):
        yield (
            f"network.host={config.network.host}: is not an address to connect to; set an address"
            " that other processes can reach"
        )


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    # The embedded model has read nothing but the embedded task.
    if data.train_files and config.model.path is None:
        yield (
            "data.train_files is set but model.path is null: the embedded model can only do the"
            " embedded task; set model.path=<directory or hub name>, or leave data.train_files"
            " empty"
        )
    # The held-out prompts of the embedded task have its own form; others would measure something
    # that is not trained.
    if data.val_files and not data.train_files:
        yield (
            "data.val_files is set but data.train_files is empty: the embedded task has its own"
            " held-out prompts; set both"
        )
    if data.train_files and not data.val_files and config.evaluation.every_steps > 0:
        yield (
            f"evaluation.every_steps={config.evaluation.every_steps} but data.val_files is empty:"
            " nothing is held out; set data.val_files=<file>, or evaluation.every_steps=0"
        )
    yield from file_problems(data)
    above = data.filter.above
    below = data.filter.below
    clip = config.reward.clip
    if above is not None and below is not None and above <= below:
        yield (
            f"data.filter.above={above:g} is not above data.filter.below={below:g}: every prompt"
            " would be removed; raise it, or set one of them to null"
        )
    for name, bound, is_reached in (
        ("above", above, above is None or above < clip),
        ("below", below, below is None or below > -clip),
    ):
        # The filter compares scaled rewards, which the clip bounds.
        if bound is not None and not is_reached:
            yield (
                f"data.filter.{name}={bound:g}: no reward is {name} it, because"
                f" reward.clip={clip:g}; set it within -{clip:g}..{clip:g}, or set it to null"
            )


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.data.ignores_end and config.algorithm.truncated != "train":
        yield (
            f"data.longest={config.data.longest} with"
            f" algorithm.truncated={config.algorithm.truncated}: every sample reaches the length"
            " limit and counts as truncated, so nothing would be learned; set"
            " algorithm.truncated=train"
        )
    # pass@k of equal samples would be pass@1, at k times the price.
    if config.evaluation.num_samples > 1 and config.evaluation.temperature == 0:
        yield (
            f"evaluation.num_samples={config.evaluation.num_samples} with evaluation.temperature=0:"
            " the greedy samples of a prompt are identical; set evaluation.num_samples=1, or"
            " evaluation.temperature=1"
        )
    generation = config.generation
    for path, section in (("generation", generation), ("evaluation", config.evaluation)):
        name = f"{path}.sampling={section.sampling}"
        try:
            support = support_of(section.sampling)
        except ValueError as error:
            yield f"{name}: {error}; give name=value pairs as docs/configuration.md describes them"
            continue
        if path == "generation" and support.is_truncated and not support.is_recorded:
            yield (
                f"{name}: the tokens that top_k and top_p leave are recorded for the learner, so"
                f" their number must be bounded; add a top_k of at most {MOST_KEPT}"
            )
        if generation.has_drafts and (support.is_truncated or support.logit_bias):
            yield (
                f"{name}: vLLM does not apply top_k, top_p and logit_bias to drafts; remove them,"
                " or speculative_config from generation.vllm.extra"
            )


def _generators(config: RunConfig) -> Iterator[str]:
    """Yield the problems of each pool's settings."""
    for pool in generator_pools(config):
        own = config_of(config, pool)
        for problem in (
            *_engine(own),
            *step_problems(own, "generators.gpus_each", own.generators.gpus_each),
        ):
            yield in_words_of(pool, config, problem)


def _engine(config: RunConfig) -> Iterator[str]:
    vllm = config.generation.vllm
    generation = config.generation
    group_size = generation.num_drawn
    if generation.engine not in ENGINES and not is_plugin(generation.engine, ENGINE):
        yield (
            f"generation.engine={generation.engine}: must be one of {', '.join(ENGINES)},"
            " package.module:function, file.py:function, or an entry point of async_rl.engines"
        )
    if not config.generation.is_vllm:
        return
    # The samples of a group share one prefill of their prompt, if they are decoded together.
    if vllm.max_num_seqs < group_size:
        yield (
            f"generation.vllm.max_num_seqs={vllm.max_num_seqs} is below"
            f" generation.group_size={group_size}: a group would never be decoded together; raise"
            f" it to at least {group_size}"
        )
    if vllm.max_num_batched_tokens < vllm.max_num_seqs:
        yield (
            f"generation.vllm.max_num_batched_tokens={vllm.max_num_batched_tokens} is below"
            f" max_num_seqs={vllm.max_num_seqs}: vLLM decodes one token of each sequence per step;"
            f" raise it to at least {vllm.max_num_seqs}"
        )
    gpus = config.generators.gpus_each
    yield from extra_problems(vllm.extra, is_eager=vllm.enforce_eager, is_gpu=gpus > 0)
    parts = vllm.num_workers
    # Without GPUs the parts share the cores of their generator.
    if parts > 1 and gpus not in (0, parts):
        yield (
            f"generation.vllm.tensor_parallel_size={vllm.tensor_parallel_size} (times"
            f" pipeline_parallel_size of generation.vllm.extra: {parts}) but"
            f" generators.gpus_each={gpus:g}: each part needs its own GPU; set"
            f" generators.gpus_each={parts}, or generation.vllm.tensor_parallel_size=1"
        )
    if gpus == 0 and vllm.kv_cache_mb == 0:
        yield (
            "generation.vllm.kv_cache_mb=0 without GPUs: the size of the KV cache is unknown; set"
            " generation.vllm.kv_cache_mb=64 or more"
        )
    # lora_shrink_op.py and lora_expand_op.py of vLLM 0.32 assert it at the first request.
    if gpus > 0 and config.model.is_applied and config.model.dtype == "float32":
        yield (
            f"model.dtype=float32 with generators.gpus_each={gpus:g} and model.lora.slots above 0:"
            " vLLM applies adapters on GPUs in 16 bits only; set model.dtype=bfloat16"
        )


def _batch(config: RunConfig) -> Iterator[str]:
    groups = config.buffer.groups_per_step
    learner = config.learner
    if groups % learner.minibatches:
        divisors = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        yield (
            f"learner.minibatches={learner.minibatches} does not divide"
            f" buffer.groups_per_step={groups}: minibatches would differ in size; set"
            f" learner.minibatches to one of {divisors}"
        )
    # Only if the minibatches divide the batch do they have a number of groups to compare with.
    elif learner.ranks // learner.context_ranks > groups // learner.minibatches:
        yield (
            f"learner.ranks={learner.ranks} but a minibatch has {groups // learner.minibatches}"
            f" groups (buffer.groups_per_step={groups} /"
            f" learner.minibatches={learner.minibatches}): ranks would be idle; lower learner.ranks"
            " or raise buffer.groups_per_step or learner.context_ranks"
        )
    longest = config.data.max_prompt_tokens + config.data.max_response_tokens
    # A sequence is never cut, so the longest one must fit into a pass of the ranks that share it.
    for name in ("budget_tokens", "forward_budget_tokens"):
        tokens = getattr(learner, name)
        if tokens is not None and tokens * learner.context_ranks < longest:
            least = -(-longest // learner.context_ranks)
            yield (
                f"learner.{name}={tokens} (times learner.context_ranks={learner.context_ranks}) is"
                f" below data.max_prompt_tokens + data.max_response_tokens = {longest}: the longest"
                f" sequence would not fit into one pass; raise learner.{name} to at least {least},"
                " or learner.context_ranks"
            )


def _shards(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.ranks % learner.context_ranks:
        yield (
            f"learner.context_ranks={learner.context_ranks} does not divide"
            f" learner.ranks={learner.ranks}: every sequence needs that many ranks; set"
            f" learner.ranks to a multiple of {learner.context_ranks}"
        )
    if learner.gpus_each > 1 or (learner.ranks > 1 and 0 < learner.gpus_each < 1):
        yield (
            f"learner.gpus_each={learner.gpus_each:g} with learner.ranks={learner.ranks}: a rank"
            " uses one GPU, and NCCL needs a whole GPU per rank; set learner.gpus_each=1 (less only"
            " with learner.ranks=1), and learner.ranks to the number of GPUs"
        )
    if learner.offload != "none" and learner.gpus_each == 0:
        yield (
            f"learner.offload={learner.offload} with learner.gpus_each=0: the learner is already in"
            " host memory; set learner.offload=none, or learner.gpus_each=1"
        )


def _optimizers(config: RunConfig) -> Iterator[str]:
    span = config.learner.optimizer.schedule_span
    is_ordered = len(span) == 2 and span[0] < span[1]
    if span and not is_ordered:
        yield (
            f"learner.optimizer.schedule_span={span}: the cosine needs its first step"
            " and a later last step, as in [5,60]; or set it to []"
        )


def _timeouts(config: RunConfig) -> Iterator[str]:
    timeouts = config.timeouts
    limit_s = config.sandbox.timeout_s
    most = 1 if config.reward.mode == "all_or_nothing" else MOST_TIMEOUTS
    if timeouts.score_s <= most * limit_s:
        each = "" if most == 1 else f" for each of the {most} tests that may use it up"
        yield (
            f"timeouts.group_s={timeouts.group_s:g} allows {timeouts.score_s:g} s for one"
            f" scoring call, not above sandbox.timeout_s={limit_s:g}{each}: the call would time"
            f" out first; raise timeouts.group_s above {4 * most * limit_s:g}, or lower"
            " sandbox.timeout_s"
        )
