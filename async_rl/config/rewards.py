"""Settings of what scores: the sandbox, the pool of verifiers, and the way from verdicts to
rewards.

Part of the schema in `config.py`, whose invariants hold here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class SandboxConfig(Section):
    """Limits on one program that the policy wrote, and how what it gives is compared."""

    timeout_s: Annotated[float, Field(gt=0)]
    """CPU seconds per test"""
    memory_mb: Annotated[int, Field(ge=16)]
    """MB of address space above the interpreter's own"""
    output_kb: Annotated[int, Field(ge=1)]
    """KB of output per test"""
    stop_at_first_failure: bool
    """leave the tests after the first failed one unrun"""
    allow_unsafe: bool
    """run even where neither namespaces nor seccomp work"""
    packages: list[str]
    """installed packages that programs may import beyond the standard library, by import name"""
    float_tolerance: Annotated[float, Field(ge=0, lt=1)]
    """relative difference at which two floats still count as equal"""
    checker: Annotated[str, Field(pattern="^[\\w.]+:\\w+$")] | None
    """module:function(input, got, expected) -> bool that decides stdin and call tests; null = the
    built-in comparison"""


class VerifiersConfig(Section):
    """The pool of verifier processes and how they are called."""

    count: Annotated[int, Field(ge=1)]
    """processes"""
    cells: Annotated[int, Field(ge=1)]
    """programs run side by side per process"""
    cores: list[int]
    """CPU cores they may use; empty = all"""
    queue_size: Annotated[int, Field(ge=1)]
    """programs that wait per process before it answers 429"""
    max_attempts: Annotated[int, Field(ge=1)]
    """calls per program before the sample fails"""
    memo_programs: Annotated[int, Field(ge=0)]
    """programs whose verdicts a generator remembers; 0 = judge every sample anew"""


class RewardModelConfig(Section):
    """The term `reward_model`: a Hugging Face sequence classifier with one output, in the verifier."""

    path: str | None
    """directory or hub name of the model, which has a chat template of its own; null = none"""
    max_tokens: Annotated[int, Field(ge=8)]
    """tokens of prompt and response in its own template; more are cut off at the end"""
    batch_size: Annotated[int, Field(ge=1)]
    """samples scored in one pass at most"""
    device: Annotated[str, Field(pattern="^(cpu|cuda(:\\d+)?)$")]
    """torch device"""
    bias: float
    """taken off its score first"""
    scale: float
    """factor on (score - bias)"""
    clip: Annotated[float, Field(gt=0)]
    """bound on the absolute scaled score"""


class RemoteConfig(Section):
    """The term `remote`: a score from an HTTP server."""

    url: Annotated[str, Field(pattern="^https?://")] | None
    """address that is asked with POST; null = none"""
    form: Literal["plain", "verifier"]
    """plain: JSON of the sample for a score; verifier: another async-rl verifier judges the row's
    tests"""
    attempts: Annotated[int, Field(ge=1)]
    """times a server that fails is asked, within reward.timeout_s"""
    token_env: Annotated[str, Field(pattern="^\\w+$")] | None
    """environment variable that holds the bearer token; null = none is sent"""


class RewardConfig(Section):
    """From verdicts and functions to a task reward."""

    fn: Annotated[str, Field(min_length=1)] | None
    """package.module:function, file.py:function, or a ready one, that scores every sample; null =
    the row's own tests"""
    fns: list[str]
    """several of them, `tests` for the row's own; the reward is their weighted sum"""
    weights: list[float]
    """factor on the score of each of fns, in their order"""
    by_source: list[Annotated[str, Field(pattern="^.+=.+$")]]
    """data_source=function: what alone scores its rows, named as in fn"""
    on_failure: Literal["drop", "stop"]
    """a function that fails: try the group again and drop it at last, or stop the run"""
    stop_if_all_fail: bool
    """stop the run before a step of which no sample has more than fail_reward: what scores may be
    broken"""
    timeout_s: Annotated[float, Field(gt=0)]
    """longest time that one call of a function may take"""
    concurrency: Annotated[int, Field(ge=1)]
    """calls side by side in each verifier; 1 for functions that are not thread-safe"""
    model: RewardModelConfig
    remote: RemoteConfig
    format_reward: float | None
    """reward of a wrong answer that has the form <think>..</think><answer>..</answer>; null = the
    form does not count"""
    mode: Literal["all_or_nothing", "fraction"]
    """1 if all tests pass, or the fraction that passes"""
    pass_reward: float
    """reward of a program that passes all tests"""
    fail_reward: float
    """reward of one that passes none"""
    extraction: Literal["auto", "fenced", "whole"]
    """the last fenced block that parses, the whole response, or fenced if there is one"""
    scale: float
    """factor on (reward - bias)"""
    bias: float
    """taken off the reward first"""
    clip: Annotated[float, Field(gt=0)]
    """bound on the absolute scaled reward"""
    placement: Literal["end", "steps", "step_deltas"]
    """one reward at the last token, or one per complete code block: its score, or what the score
    changed"""
    overlong_tokens: Annotated[int, Field(ge=0)]
    """tokens below data.max_response_tokens over which a penalty rises; 0 = none"""
    overlong_penalty: Annotated[float, Field(ge=0)]
    """reward taken off an answer of data.max_response_tokens, after scaling"""
