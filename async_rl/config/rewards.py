"""Settings of what scores: the sandbox, the pool of verifiers, and the way from verdicts to
rewards.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config.base import Section


class SandboxConfig(Section):
    """Limits on one program that the policy wrote, and how what it gives is compared."""

    timeout_s: Annotated[float, Meta(gt=0, description="CPU seconds per test")]
    memory_mb: Annotated[
        int, Meta(ge=16, description="MB of address space above the interpreter's own")
    ]
    output_kb: Annotated[int, Meta(ge=1, description="KB of output per test")]
    stop_at_first_failure: Annotated[
        bool, Meta(description="leave the tests after the first failed one unrun")
    ]
    allow_unsafe: Annotated[
        bool, Meta(description="run even where neither namespaces nor seccomp work")
    ]
    packages: Annotated[
        list[str],
        Meta(
            description=(
                "installed packages that programs may import beyond the standard library, by import"
                " name"
            )
        ),
    ]
    float_tolerance: Annotated[
        float,
        Meta(
            ge=0, lt=1, description="relative difference at which two floats still count as equal"
        ),
    ]
    checker: Annotated[
        Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None,
        Meta(
            description=(
                "module:function(input, got, expected) -> bool that decides stdin and call tests;"
                " null = the built-in comparison"
            )
        ),
    ]


class VerifiersConfig(Section):
    """The pool of verifier processes and how they are called."""

    count: Annotated[int, Meta(ge=1, description="processes")]
    cells: Annotated[int, Meta(ge=1, description="programs run side by side per process")]
    cores: Annotated[list[int], Meta(description="CPU cores they may use; empty = all")]
    queue_size: Annotated[
        int, Meta(ge=1, description="programs that wait per process before it answers 429")
    ]
    max_attempts: Annotated[
        int, Meta(ge=1, description="calls per program before the sample fails")
    ]
    memo_programs: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "programs whose verdicts a generator remembers; 0 = judge every sample anew"
            ),
        ),
    ]


class RewardModelConfig(Section):
    """The term `reward_model`: a Hugging Face sequence classifier with one output, in the verifier."""

    path: Annotated[
        str | None,
        Meta(
            description=(
                "directory or hub name of the model, which has a chat template of its own; null ="
                " none"
            )
        ),
    ]
    max_tokens: Annotated[
        int,
        Meta(
            ge=8,
            description=(
                "tokens of prompt and response in its own template; more are cut off at the end"
            ),
        ),
    ]
    batch_size: Annotated[int, Meta(ge=1, description="samples scored in one pass at most")]
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description="torch device")]
    bias: Annotated[float, Meta(description="taken off its score first")]
    scale: Annotated[float, Meta(description="factor on (score - bias)")]
    clip: Annotated[float, Meta(gt=0, description="bound on the absolute scaled score")]


class RemoteConfig(Section):
    """The term `remote`: a score from an HTTP server."""

    url: Annotated[
        Annotated[str, Meta(pattern=r"^https?://")] | None,
        Meta(description="address that is asked with POST; null = none"),
    ]
    form: Annotated[
        Literal["plain", "verifier"],
        Meta(
            description=(
                "plain: JSON of the sample for a score; verifier: another async-rl verifier judges"
                " the row's tests"
            )
        ),
    ]
    attempts: Annotated[
        int, Meta(ge=1, description="times a server that fails is asked, within reward.timeout_s")
    ]
    token_env: Annotated[
        Annotated[str, Meta(pattern=r"^\w+$")] | None,
        Meta(description="environment variable that holds the bearer token; null = none is sent"),
    ]


class RewardConfig(Section):
    """From verdicts and functions to a task reward."""

    fn: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description=(
                "package.module:function, file.py:function, or a ready one, that scores every"
                " sample; null = the row's own tests"
            )
        ),
    ]
    fns: Annotated[
        list[str],
        Meta(
            description=(
                "several of them, `tests` for the row's own; the reward is their weighted sum"
            )
        ),
    ]
    weights: Annotated[
        list[float], Meta(description="factor on the score of each of fns, in their order")
    ]
    by_source: Annotated[
        list[Annotated[str, Meta(pattern=r"^.+=.+$")]],
        Meta(description="data_source=function: what alone scores its rows, named as in fn"),
    ]
    on_failure: Annotated[
        Literal["drop", "stop"],
        Meta(
            description=(
                "a function that fails: try the group again and drop it at last, or stop the run"
            )
        ),
    ]
    stop_if_all_fail: Annotated[
        bool,
        Meta(
            description=(
                "stop the run before a step of which no sample has more than fail_reward: what"
                " scores may be broken"
            )
        ),
    ]
    timeout_s: Annotated[
        float, Meta(gt=0, description="longest time that one call of a function may take")
    ]
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "calls side by side in each verifier; 1 for functions that are not thread-safe"
            ),
        ),
    ]
    model: RewardModelConfig
    remote: RemoteConfig
    format_reward: Annotated[
        float | None,
        Meta(
            description=(
                "reward of a wrong answer that has the form <think>..</think><answer>..</answer>;"
                " null = the form does not count"
            )
        ),
    ]
    mode: Annotated[
        Literal["all_or_nothing", "fraction"],
        Meta(description="1 if all tests pass, or the fraction that passes"),
    ]
    pass_reward: Annotated[float, Meta(description="reward of a program that passes all tests")]
    fail_reward: Annotated[float, Meta(description="reward of one that passes none")]
    extraction: Annotated[
        Literal["auto", "fenced", "whole"],
        Meta(
            description=(
                "the last fenced block that parses, the whole response, or fenced if there is one"
            )
        ),
    ]
    scale: Annotated[float, Meta(description="factor on (reward - bias)")]
    bias: Annotated[float, Meta(description="taken off the reward first")]
    clip: Annotated[float, Meta(gt=0, description="bound on the absolute scaled reward")]
    placement: Annotated[
        Literal["end", "steps", "step_deltas"],
        Meta(
            description=(
                "one reward at the last token, or one per complete code block: its score, or what"
                " the score changed"
            )
        ),
    ]
    overlong_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "tokens below data.max_response_tokens over which a penalty rises; 0 = none"
            ),
        ),
    ]
    overlong_penalty: Annotated[
        float,
        Meta(
            ge=0,
            description="reward taken off an answer of data.max_response_tokens, after scaling",
        ),
    ]
