"""Checks of settings against each other and against the machine: what cannot work, or leaves a
setting without effect, is refused before any process starts.

Invariants: each problem is one line with path=value, the reason and the remedy; all problems are
reported together; only `machine_problems` reads more than the configuration.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from async_rl.config.base import Section, show
from async_rl.config.checks.sections import extra_problems, pool_problems, reward_problems
from async_rl.config.launchers import ClusterLaunch
from async_rl.config.policy_losses import BehaviorLoss
from async_rl.config.pool_sizes import in_words_of, pool_counts
from async_rl.config.pools import pool_configs
from async_rl.config.rewards import MOST_TIMEOUTS
from async_rl.config.run import RunConfig
from async_rl.config.sampling import support_of
from async_rl.core.calls import MOST_KEPT
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.core.records import read_packaged

_RELATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is not": operator.ne,
    "above": operator.gt,
    "above twice": lambda value, other: value > 2 * other,
    "above the next of": lambda value, other: value > other + 1,
    "not above": operator.le,
    "not above minus": lambda value, other: value <= -other,
    "below": operator.lt,
    "not below": operator.ge,
    "in": lambda value, values: value in values,
    "not in": lambda value, values: value not in values,
    "does not divide": lambda value, other: other % value != 0,
    "no multiple of": lambda value, other: value % other != 0,
}


def check(config: RunConfig) -> None:
    """Raise ConfigError with one line per problem if settings contradict each other."""
    raise_if_any(problems(config))


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise ConfigError with the problems, one per line, if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def problems(config: RunConfig) -> Iterator[str]:
    """Yield all contradictions within a configuration."""
    # A pool inherits settings, and with them problems of the main pool: report each once.
    yield from dict.fromkeys(_pools(config))
    yield from pool_problems(config)
    for file in sorted({*config.data.train_files} & {*config.data.val_files}):
        yield (
            f"data.val_files={file}: is also in data.train_files, so nothing is held out; name a"
            " file that is not used for training"
        )
    yield from _sampling(config)
    yield from _batch(config)
    yield from _learner(config)
    yield from reward_problems(config)
    yield from _timeouts(config)
    yield from _launcher(config)


def machine_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield the cores and GPUs that are configured but that the machine does not have.

    Runs on a cluster are not checked: their nodes differ from this machine.
    """
    # The command line may run on a login node without GPUs.
    if not config.launcher.is_one_machine:
        return
    pools = {pool: own.generators for pool, own in pool_configs(config).items()}
    cores_of = {
        in_words_of(pool, config, "generators.cores="): own.cores for pool, own in pools.items()
    }
    cores_of["verifiers.cores="] = config.verifiers.cores
    cores_of["learner.cores="] = config.learner.cores
    have = ", ".join(map(str, machine.cores))
    for setting, cores in cores_of.items():
        if missing := sorted(set(cores) - set(machine.cores)):
            yield (
                f"{setting}{cores}: this machine does not have {', '.join(map(str, missing))}; name"
                f" some of {have}, or [] for all"
            )
    counts = pool_counts(config)
    # A pool of 0 generators takes no GPU yet; async-rl scale runs this check again with its counts.
    taken = [
        (in_words_of(pool, config, "generators.gpus_each="), counts[pool], own.gpus_each)
        for pool, own in pools.items()
        if counts[pool]
    ]
    taken.append(("learner.gpus_each=", config.learner.ranks, config.learner.gpus_each))
    wanted = sum(count * each for _, count, each in taken)
    if wanted > machine.num_gpus:
        users = " and ".join(f"{setting}{each:g} x {count}" for setting, count, each in taken)
        yield (
            f"{users} need {wanted:g} GPUs, this machine has {machine.num_gpus} that torch and"
            " vLLM can use; lower them, or set them to 0 to use the CPU"
        )


def _pools(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the configuration that each pool of generators reads."""
    for pool, own in pool_configs(config).items():
        for problem in (*combination_problems(own), *_engine(own)):
            yield in_words_of(pool, config, problem)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A refused combination: its conditions, and the reason with the remedy.

    when: the path of a setting, a relation, and a value or the path of another setting.
    """

    when: list[tuple[str, str, Any]]
    because: str


@functools.cache
def rows() -> list[Row]:
    """The rows of combinations.yaml."""
    return read_packaged(__package__, "combinations.yaml", list[Row])


def combination_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each row whose conditions hold."""
    values = dict(_by_path(config, ""))
    for row in rows():
        shown = _matching(row, values)
        if shown:
            first, *others = shown
            with_others = f" with {', '.join(others)}" if others else ""
            yield f"{first}{with_others}: {row.because}"


def _matching(row: Row, values: Mapping[str, Any]) -> list[str]:
    """The settings that the row compares, as path=value; none if a condition does not hold."""
    compared: dict[str, Any] = {}
    for path, relation, other in row.when:
        is_setting = isinstance(other, str) and (other in values or "." in other)
        paths = [path, other] if is_setting else [path]
        if not values.keys() >= set(paths):
            return []
        compared |= {each: values[each] for each in paths}
        if is_setting:
            other = values[other]
        if not _RELATIONS[relation](values[path], other):
            return []
    return [f"{path}={show(value)}" for path, value in compared.items()]


def _by_path(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings by path; a choice has the name of its variant."""
    for name, value in section:
        if isinstance(value, Section):
            yield from _by_path(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".removesuffix(".kind"), value


def _sampling(config: RunConfig) -> Iterator[str]:
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


def _engine(config: RunConfig) -> Iterator[str]:
    vllm = config.generation.vllm
    generation = config.generation
    if not generation.is_vllm:
        return
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


def _batch(config: RunConfig) -> Iterator[str]:
    groups = config.buffer.groups_per_step
    learner = config.learner
    # Only if the minibatches divide the batch do they have a number of groups to compare with.
    is_divided = groups % learner.minibatches == 0
    if is_divided and learner.ranks // learner.context_ranks > groups // learner.minibatches:
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


def _learner(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    span = learner.optimizer.schedule_span
    is_ordered = len(span) == 2 and span[0] < span[1]
    if span and not is_ordered:
        yield (
            f"learner.optimizer.schedule_span={span}: the cosine needs its first step"
            " and a later last step, as in [5,60]; or set it to []"
        )
    loss = config.algorithm.policy_loss
    quantization = config.generation.quantization
    has_correction = isinstance(loss, BehaviorLoss) or loss.correction.kind != "none"
    if quantization and not has_correction:
        yield (
            f"generation.vllm.extra={quantization} with"
            " algorithm.policy_loss.correction=none: the weights that draw the samples are rounded"
            " and those that are trained are not; set algorithm.policy_loss.correction=token_tis"
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


def _launcher(config: RunConfig) -> Iterator[str]:
    cluster = config.launcher
    if config.network.host.startswith("127.") and not cluster.uses_one_node:
        yield (
            f"network.host={config.network.host}: other machines cannot reach it; set"
            " network.host=auto for the node's address"
        )
    if not isinstance(cluster, ClusterLaunch):
        return
    launches = [own.launcher for own in pool_configs(config).values()]
    generator_cpus = [own.generator_cpus for own in launches if isinstance(own, ClusterLaunch)]
    # The cluster would refuse such a process inside the job, after hours in the queue.
    largest = max(config.verifiers.cells, cluster.learner_cpus, *generator_cpus)
    if 0 < cluster.cpus_per_node < largest:
        yield (
            f"launcher.extra has --cpus-per-task={cluster.cpus_per_node}: a process needs {largest}"
            " (verifiers.cells, launcher.generator_cpus, launcher.learner_cpus); raise it, or"
            " remove it for exclusive nodes"
        )
