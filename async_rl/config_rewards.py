"""Settings of what scores: the sandbox, the pool of verifiers, and the way from verdicts to rewards.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config_base import Section


class SandboxConfig(Section):
    """Limits on one program that the policy wrote, and how what it gives is compared."""

    timeout_s: Annotated[float, Meta(gt=0, description="CPU seconds per test")]
    memory_mb: Annotated[int, Meta(ge=16, description="MB of address space above the interpreter's own")]
    output_kb: Annotated[int, Meta(ge=1, description="KB of output per test")]
    stop_at_first_failure: Annotated[bool, Meta(description="leave the tests after the first failed one unrun")]
    allow_unsafe: Annotated[bool, Meta(description="run even where neither namespaces nor seccomp work")]
    packages: Annotated[
        list[str], Meta(description="installed packages that programs may import beyond the standard library, by import name")
    ]
    float_tolerance: Annotated[float, Meta(ge=0, lt=1, description="relative difference at which two floats still count as equal")]
    checker: Annotated[
        Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None,
        Meta(description="module:function(input, got, expected) -> bool that decides stdin and call tests; null = the built-in comparison"),
    ]


class VerifiersConfig(Section):
    """The pool of verifier processes and how they are called."""

    count: Annotated[int, Meta(ge=1, description="processes")]
    cells: Annotated[int, Meta(ge=1, description="programs run side by side per process")]
    cores: Annotated[list[int], Meta(description="CPU cores they may use; empty = all")]
    queue_size: Annotated[int, Meta(ge=1, description="programs that wait per process before it answers 429")]
    timeout_s: Annotated[float, Meta(gt=0, description="longest time one scoring call may take, its wait included")]
    max_attempts: Annotated[int, Meta(ge=1, description="calls per program before the sample fails")]
    memo_programs: Annotated[int, Meta(ge=0, description="programs whose verdicts a generator remembers; 0 = judge every sample anew")]


class RewardConfig(Section):
    """From verdicts to a task reward."""

    mode: Annotated[Literal["all_or_nothing", "fraction"], Meta(description="1 if all tests pass, or the fraction that passes")]
    pass_reward: Annotated[float, Meta(description="reward of a program that passes all tests")]
    fail_reward: Annotated[float, Meta(description="reward of one that passes none")]
    extraction: Annotated[
        Literal["auto", "fenced", "whole"],
        Meta(description="the last fenced block that parses, the whole response, or fenced if there is one"),
    ]
    scale: Annotated[float, Meta(description="factor on (reward - bias)")]
    bias: Annotated[float, Meta(description="taken off the reward first")]
    clip: Annotated[float, Meta(gt=0, description="bound on the absolute scaled reward")]
    placement: Annotated[
        Literal["end", "steps", "step_deltas"],
        Meta(description="one reward at the last token, or one per complete code block: its score, or what the score changed"),
    ]
    overlong_tokens: Annotated[int, Meta(ge=0, description="tokens below data.max_response_tokens over which a penalty rises; 0 = none")]
    overlong_penalty: Annotated[float, Meta(ge=0, description="reward taken off an answer of data.max_response_tokens, after scaling")]
