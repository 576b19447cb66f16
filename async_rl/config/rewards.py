"""Settings of scoring: the sandbox, the verifier pool, reward functions and the reward's scale.

Part of the schema in `run.py`, whose invariants hold here.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from async_rl.config.base import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    Section,
    Tag,
    Text,
    Word,
)

_AbsolutePath = Annotated[str, Field(pattern="^/")]
Extraction = Literal["auto", "fenced", "whole"]

MOST_TIMEOUTS = 2
"""Tests of a program that may use up their time where a failure does not end its tests. Without
this limit a program that never exits would hold a cell for the limit of every test.
"""


OUTPUT_KB = 1024
"""KB of output per test, or twice the expected output if that is more; a request may name another
limit. A program that prints without end must not fill the memory of its verifier.
"""


class SandboxConfig(Section):
    """Limits on one program that the policy wrote, and the comparison of its results."""

    timeout_s: PositiveFloat
    """CPU seconds per test"""
    # In addition to the interpreter, whose own mappings differ between versions of Python.
    memory_mb: Annotated[int, Field(ge=16)]
    """MB of address space in addition to the interpreter"""
    allow_unsafe: bool
    """run even if neither namespaces nor seccomp are available"""
    packages: Annotated[list[str], OneOrMore]
    """installed packages that programs may import besides the standard library, by import name"""
    float_tolerance: BelowOne
    """largest relative difference of floats that count as equal, in problems that state none; 0 =
    exact"""
    checker_headers: _AbsolutePath | None
    """directory with testlib.h and other headers that checkers in C++ include; null = none"""
    container_engine: Annotated[list[str], Field(min_length=1), OneOrMore]
    """command of Podman, with its global options, for tests that run in a container"""
    # By name, so that the rows of a data set do not depend on the paths of one machine.
    rootfs: dict[str, _AbsolutePath]
    """directories with a root file system, by the name that container tests give as image"""


class VerifiersConfig(Section):
    """The pool of verifier processes and the calls to them."""

    count: PositiveInt
    """number of processes"""
    cells: PositiveInt
    """programs run in parallel per process"""
    cores: list[int]
    """numbers of the CPU cores for verifiers; empty = all"""


class Term(Section):
    """The parameters of every term."""

    weight: float
    """factor on the term's score in the sum"""
    sources: Annotated[list[Text], OneOrMore]
    """values of data_source: terms with a row's source score it instead of those without sources;
    empty = every other row"""


class ProvidedTerm(Term):
    """The row's tests or answer, judged by the verifier, or a provided function."""

    kind: Literal["tests", "xml_format", "length"]


class PluginTerm(Term):
    """A function of yours."""

    kind: Literal["plugin"]
    fn: Text
    """plug-in: function that scores a sample"""


class RewardModelTerm(Term):
    """A Hugging Face sequence classifier with one output."""

    kind: Literal["reward_model"]
    path: str
    """directory or hub name of the model, which must have a chat template"""
    max_tokens: Annotated[int, Field(ge=8)]
    """tokens of prompt and response in the model's chat template; the end is cut off beyond them"""
    batch_size: PositiveInt
    """largest number of samples scored in one pass"""
    device: Annotated[str, Field(pattern="^(cpu|cuda(:\\d+)?)$")]
    """torch device"""
    bias: float
    """subtracted from the score before scaling"""
    scale: float
    """factor on (score - bias)"""
    clip: PositiveFloat
    """bound on the absolute scaled score"""


class RemoteTerm(Term):
    """A score from an HTTP server."""

    kind: Literal["remote"]
    url: Annotated[str, Field(pattern="^https?://")]
    """address of the POST requests"""
    form: Literal["plain", "verifier"]
    """plain = send the sample as JSON, receive a score; verifier = another async-rl verifier judges
    the row's tests"""
    attempts: PositiveInt
    """requests of form plain to a server that fails, within timeouts.group_s / 12"""
    # The name of a variable and not the token: config.yaml is copied to mirrors.
    token_env: Word | None
    """environment variable that contains the bearer token; null = send none"""


RewardTerm = ProvidedTerm | PluginTerm | RewardModelTerm | RemoteTerm


TESTS = "tests"
"""The row's tests or answer, judged by the verifier."""


class Part(NamedTuple):
    """One part of a reward: the name of a term that calls a function, or TESTS."""

    function: str
    weight: float


class RewardConfig(Section):
    """From verdicts and functions to a task reward."""

    terms: dict[str, Annotated[RewardTerm, Tag]]
    """parts of the reward by name, summed with their weights; empty = the row's tests"""
    stop_on: Annotated[list[Literal["function_failure", "all_failed"]], OneOrMore]
    """stop the run: function_failure = when a function fails, instead of retrying the group;
    all_failed = before a step if no sample of it has more than fail_reward"""
    concurrency: PositiveInt
    """concurrent calls in each verifier; set 1 for functions that are not thread-safe"""
    format_reward: float | None
    """reward of a wrong answer in the format <think>..</think><answer>..</answer>; null = the
    format does not count"""
    mode: Literal["all_or_nothing", "fraction"]
    """all_or_nothing = pass_reward if all tests pass, else fail_reward; fraction = between them, by
    the fraction of tests that pass"""
    pass_reward: float
    """reward of a program that passes all tests"""
    fail_reward: float
    """reward of a program that passes no test"""
    extraction: Extraction
    """fenced = the last complete fenced block; whole = the whole response; auto = fenced if there
    is a fence, else whole"""
    scale: float
    """factor on (reward - bias)"""
    bias: float
    """subtracted from the reward before scaling"""
    clip: PositiveFloat
    """bound on the absolute scaled reward"""
    placement: Literal["end", "steps", "step_deltas"]
    """end = one reward at the last token; steps = the score of each complete code block at its end;
    step_deltas = the change of the score since the step before"""
    overlong_tokens: NonNegativeInt
    """length of the range of a rising penalty below data.max_response_tokens; 0 = no
    penalty"""
    overlong_penalty: NonNegativeFloat
    """penalty of an answer of data.max_response_tokens, subtracted after scaling"""

    def terms_of(self, data_source: str) -> tuple[Part, ...]:
        """Return the parts whose weighted sum is the reward of a row of this source."""
        own = self._chosen(data_source)
        if not own:
            return (Part(TESTS, 1.0),)
        return tuple(
            Part(TESTS if term.kind == TESTS else name, term.weight) for name, term in own.items()
        )

    def _chosen(self, data_source: str) -> dict[str, RewardTerm]:
        own = {name: term for name, term in self.terms.items() if data_source in term.sources}
        # Terms for a source replace the general terms: a row of mathematics has no tests to run.
        return own or {name: term for name, term in self.terms.items() if not term.sources}

    @property
    def functions(self) -> tuple[str, ...]:
        """The name of every term that calls a function."""
        return tuple(name for name, term in self.terms.items() if term.kind != TESTS)

    def needs_tests(self, data_source: str) -> bool:
        """Return whether a row of this source must have tests or an answer."""
        terms = self._chosen(data_source).values()
        return not terms or any(
            term.kind == TESTS or (isinstance(term, RemoteTerm) and term.form == "verifier")
            for term in terms
        )
