"""Every number of a run, declared once with its unit and meaning.

Names are TensorBoard tags and the keys of metrics.jsonl.  A part in angle brackets stands for one
path element that is known only at run time (`failures/<reason>`).  The metrics writer refuses what
is not declared here; docs and dashboards are made from it. Pure data; anyone may import it.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class MetricKind(enum.StrEnum):
    """How a metric is recorded."""

    SCALAR = "scalar"
    HISTOGRAM = "histogram"
    TEXT = "text"


class MetricSpec(NamedTuple):
    """One declared metric."""

    name: str
    unit: str
    meaning: str
    kind: MetricKind = MetricKind.SCALAR


def _declare(group: str, rows: Iterable[tuple[str, str, str]]) -> list[MetricSpec]:
    return [MetricSpec(f"{group}/{name}", unit, meaning) for name, unit, meaning in rows]


_LEARNER = [
    *_declare(
        "reward",
        [
            ("mean", "reward", "mean task reward of the step's samples, before scaling"),
            ("std", "reward", "standard deviation of the task reward over the step's samples"),
            (
                "failed_share",
                "share",
                (
                    "samples with no more than reward.fail_reward; 1 raises an alarm: what scores"
                    " may be broken"
                ),
            ),
            (
                "solve_all",
                "share",
                "groups in which every sample has the full reward: nothing to learn from",
            ),
            (
                "baseline_mean",
                "reward",
                (
                    "mean task reward of the greedy answers that remax takes as baseline, before"
                    " scaling"
                ),
            ),
            (
                "part/<name>",
                "1",
                (
                    "mean of one named part of the reward: of a function of the user's, of the"
                    " row's tests, of the form"
                ),
            ),
            (
                "solve_none",
                "share",
                "groups in which no sample has the full reward: nothing to learn from",
            ),
        ],
    ),
    *_declare("loss", [("policy", "1", "clipped decoupled policy objective, as minimised")]),
    *_declare(
        "policy",
        [
            (
                "entropy",
                "nats",
                "mean entropy of the policy over the full vocabulary at trained tokens",
            ),
            (
                "clip_fraction",
                "share",
                "trained tokens whose ratio to the proximal policy is clipped",
            ),
            ("clip_fraction_low", "share", "trained tokens clipped at 1 - clip_low"),
            ("clip_fraction_high", "share", "trained tokens clipped at 1 + clip_high"),
            (
                "kl_behavior_proximal",
                "nats",
                (
                    "KL of the policy that sampled to the one before the update: how off-policy the"
                    " batch is"
                ),
            ),
            (
                "kl_proximal_policy",
                "nats",
                (
                    "KL of the policy before the update to the one after its minibatches: how far a"
                    " step goes"
                ),
            ),
            ("kl_reference", "nats", "KL to the reference model"),
            ("kl_coef", "1", "weight of the KL to the reference in this step"),
            (
                "left_out_share",
                "share",
                "trained tokens of sequences that max_mean_ratio left out of an update",
            ),
            (
                "behavior_weight_mean",
                "1",
                (
                    "mean behavior weight, exp(proximal - behavior), before its bounds; 1 when"
                    " on-policy"
                ),
            ),
            ("behavior_weight_max", "1", "largest behavior weight before its bounds"),
            (
                "behavior_weight_clipped_share",
                "share",
                "trained tokens whose behavior weight was capped or masked",
            ),
            (
                "effective_sample_size",
                "share",
                "(sum w)^2 / (n sum w^2) of the behavior weights; 1 when on-policy",
            ),
            ("grad_norm", "1", "global gradient norm of the actor before clipping"),
            ("lr", "1", "learning rate of the actor"),
        ],
    ),
    *_declare(
        "value",
        [
            ("loss", "reward^2", "critic's loss"),
            (
                "explained_variance",
                "share",
                "1 - var(returns - values) / var(returns); below 0 the critic harms",
            ),
            ("return_mean", "reward", "mean return over trained tokens"),
            ("grad_norm", "1", "global gradient norm of the critic before clipping"),
            ("lr", "1", "learning rate of the critic"),
        ],
    ),
    *_declare(
        "advantage",
        [
            ("mean", "reward", "mean advantage over trained tokens, before normalisation"),
            (
                "std",
                "reward",
                "standard deviation of the advantage over trained tokens, before normalisation",
            ),
        ],
    ),
    *_declare(
        "mismatch",
        [
            (
                "engine_abs_mean",
                "nats",
                (
                    "mean |engine - learner| log-prob on tokens of the learner's version; those of"
                    " samples that span a push saw old KV"
                ),
            ),
            (
                "engine_abs_max",
                "nats",
                (
                    "largest |engine - learner| log-prob on tokens of the learner's version; those"
                    " of samples that span a push saw old KV"
                ),
            ),
            (
                "stale_abs_mean",
                "nats",
                (
                    "mean difference of behavior and proximal log-probs on sequences that older"
                    " versions began"
                ),
            ),
        ],
    ),
    *_declare(
        "staleness",
        [
            (
                "mean_versions",
                "versions",
                (
                    "learner version before the update minus behavior version, mean over trained"
                    " tokens"
                ),
            ),
            (
                "max_versions",
                "versions",
                (
                    "learner version before the update minus the oldest behavior version among"
                    " trained tokens"
                ),
            ),
        ],
    ),
    MetricSpec(
        "staleness/versions",
        "versions",
        "learner version minus behavior version of the trained tokens",
        MetricKind.HISTOGRAM,
    ),
    *_declare(
        "length",
        [
            ("response_mean", "tokens", "mean length of the responses"),
            ("response_max", "tokens", "longest response"),
            ("truncated_share", "share", "responses that were cut by the length limit"),
        ],
    ),
    *_declare("tokens", [("trained", "tokens", "trained tokens of the step")]),
    *_declare(
        "time",
        [
            ("advantages_s", "s", "advantages and targets of the step"),
            ("forward_s", "s", "proximal, reference and value passes before the update"),
            ("update_s", "s", "minibatches: forward, backward, optimizer"),
            ("step_s", "s", "the whole learner step, its wait for the batch included"),
            ("wait_batch_s", "s", "the learner's wait for the batch of the step"),
        ],
    ),
    *_declare(
        "weights",
        [
            (
                "push_s",
                "s",
                (
                    "newest push: the slowest generator's load, from the request to its"
                    " acknowledgement"
                ),
            ),
            ("pause_s", "s", "newest push: longest time a generator stood still"),
            (
                "probe_abs_max",
                "nats",
                "largest difference of learner and generator on the probe tokens so far",
            ),
        ],
    ),
]

_EVALUATION = _declare(
    "eval",
    [
        (
            "pass_at_1",
            "share",
            (
                "held-out samples that pass all tests: the mean over prompts of the share of their"
                " samples (mean@k)"
            ),
        ),
        (
            "pass_at_1_error",
            "share",
            (
                "half the width of the 95% confidence interval of pass_at_1, from the spread over"
                " prompts"
            ),
        ),
        (
            "pass_at_k",
            "share",
            "held-out prompts of which at least one of evaluation.num_samples samples passes",
        ),
        ("pass_at_k_error", "share", "half the width of the 95% confidence interval of pass_at_k"),
        (
            "maj_at_k",
            "share",
            (
                "held-out prompts of which the answer that most of the samples give passes; ties"
                " count by their share"
            ),
        ),
        ("maj_at_k_error", "share", "half the width of the 95% confidence interval of maj_at_k"),
        (
            "greedy_pass",
            "share",
            "held-out prompts of which the greedy answer passes (evaluation.greedy)",
        ),
        (
            "greedy_pass_error",
            "share",
            "half the width of the 95% confidence interval of greedy_pass",
        ),
        ("reward_mean", "reward", "mean reward of the held-out samples"),
        (
            "reward_mean_error",
            "reward",
            "half the width of the 95% confidence interval of reward_mean",
        ),
        (
            "version_mean",
            "version",
            (
                "mean version of the weights that wrote the held-out tokens; the one evaluated is"
                " the metric's step"
            ),
        ),
        ("num_samples", "samples", "held-out samples scored"),
        ("length_mean", "tokens", "mean length of the held-out responses"),
        ("truncated_share", "share", "held-out responses that were cut by the length limit"),
    ],
)

_DEVICE = _declare(
    "device",
    [
        (
            "generating_share",
            "share",
            (
                "placement=colocated, of the time since the last step: the generators' turn, loads"
                " included"
            ),
        ),
        (
            "learning_share",
            "share",
            "placement=colocated, of the time since the last step: the learner's turn",
        ),
        (
            "switching_share",
            "share",
            (
                "placement=colocated, of the time since the last step: generators come to rest, the"
                " learner moves"
            ),
        ),
    ],
)

_SUPERVISOR = [
    *_declare(
        "throughput",
        [
            (
                "generated_tokens_per_s",
                "tokens/s",
                "tokens that all generators sampled since the last step",
            ),
            ("trained_tokens_per_s", "tokens/s", "tokens trained since the last step"),
            ("steps_per_s", "1/s", "learner steps, over the last one"),
            ("samples_scored_per_s", "1/s", "samples that were scored since the last step"),
        ],
    ),
    *_declare(
        "busy",
        [
            (
                "<role>",
                "share",
                "of the time since the last step, mean over the role's processes: at work",
            )
        ],
    ),
    *_declare(
        "waiting",
        [
            (
                "<role>",
                "share",
                "of the time since the last step: nothing to do until something upstream comes",
            )
        ],
    ),
    *_declare(
        "blocked",
        [
            (
                "<role>",
                "share",
                (
                    "of the time since the last step: could work and is held back by something"
                    " downstream"
                ),
            )
        ],
    ),
    *_declare(
        "stage_s",
        [
            (
                "<role>/<stage>",
                "s",
                "since the last step, mean over the role's processes: in this stage",
            )
        ],
    ),
    *_declare(
        "wait_s",
        [
            (
                "<role>/<what>",
                "s",
                "since the last step, mean over the role's processes: some task waited for this",
            )
        ],
    ),
    *_declare(
        "blocked_s",
        [
            (
                "<role>/<what>",
                "s",
                (
                    "since the last step, mean over the role's processes: some task was held back"
                    " by this"
                ),
            )
        ],
    ),
    *_declare(
        "queue",
        [
            ("issued", "groups", "handed to a generator, no token yet"),
            ("generating", "groups", "being written"),
            ("ready", "groups", "complete, waiting to be trained"),
            ("leased", "groups", "with the learner"),
        ],
    ),
    *_declare(
        "verifier",
        [
            ("latency_p50_s", "s", "median time to judge one program, seen from the generators"),
            (
                "memo_share",
                "share",
                "of the programs so far: verdicts that were known and needed no run",
            ),
            (
                "latency_p99_s",
                "s",
                "99th percentile of the time to judge one program, seen from the generators",
            ),
        ],
    ),
    *_declare(
        "failures",
        [
            (
                "<reason>",
                "1",
                "attempts or groups that failed for this reason, since the start of the run",
            )
        ],
    ),
    *_declare("restarts", [("<process>", "1", "times the process was started again")]),
    *_declare(
        "scale",
        [
            (
                "<pool>_wanted",
                "1",
                (
                    "processes of the pool that there should be: set at launch, by async-rl scale"
                    " or by the autoscaler"
                ),
            ),
            ("<pool>_live", "1", "processes of the pool that serve and stay"),
        ],
    ),
    *_declare("memory", [("<process>_mb", "MB", "resident memory of the process")]),
    *_declare(
        "cpu", [("<process>", "cores", "CPU seconds per second of the process since the last step")]
    ),
]

_TEXTS = [
    MetricSpec("run/config", "text", "the resolved configuration", MetricKind.TEXT),
    MetricSpec(
        "run/stalled",
        "text",
        "who waits for what, written when no step came for supervisor.stall_warning_s",
        MetricKind.TEXT,
    ),
    MetricSpec(
        "run/silent",
        "text",
        "which process is not heard of, since when, and what its machine says of it",
        MetricKind.TEXT,
    ),
    MetricSpec(
        "run/alarm",
        "text",
        "that no sample of a step was rewarded, at the first such step in a row",
        MetricKind.TEXT,
    ),
    MetricSpec("run/restarts", "text", "which process was started again, and why", MetricKind.TEXT),
    MetricSpec(
        "samples/<page>", "text", "rollouts of the step: prompt, answer, verdicts", MetricKind.TEXT
    ),
]

METRICS: Mapping[str, MetricSpec] = {
    spec.name: spec for spec in (*_LEARNER, *_DEVICE, *_EVALUATION, *_SUPERVISOR, *_TEXTS)
}
"""All declared metrics by name; names may hold placeholders."""

FIRST_SCREEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("1 reward", ("reward/mean",)),
    ("2 held-out pass@1", ("eval/pass_at_1",)),
    ("3 staleness", ("staleness/max_versions", "staleness/mean_versions")),
    ("4 effective sample size", ("policy/effective_sample_size",)),
    ("5 KL", ("policy/kl_behavior_proximal", "policy/kl_reference")),
    ("6 entropy", ("policy/entropy",)),
    ("7 response length", ("length/response_mean", "length/response_max")),
    (
        "8 tokens per second",
        ("throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s"),
    ),
    ("9 who works", ("busy/generator", "busy/learner", "busy/verifier")),
    ("10 weight push", ("weights/push_s", "weights/pause_s")),
)
"""The ten numbers to watch: title of the chart and its metrics."""


def describe(name: str) -> MetricSpec | None:
    """The declaration that covers `name`, an exact one before one with placeholders; None if
    nothing does.
    """
    exact = METRICS.get(name)
    if exact is not None:
        return exact if "<" not in name else None
    return next((spec for pattern, spec in _patterns() if pattern.fullmatch(name)), None)


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricSpec], ...]:
    return tuple((_pattern(name), spec) for name, spec in METRICS.items() if "<" in name)


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<[a-z]+>", name)
    return re.compile("[^/<>]+".join(re.escape(part) for part in parts))
