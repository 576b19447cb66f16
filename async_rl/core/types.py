"""The vocabulary of the data: prompts, tickets, trajectories, groups and their states.

Invariants
- Position t of every per-token array is about token t of `token_ids` (prompt first, then response).
- `loss_mask` is True exactly where the policy wrote the token and it is to be trained; prompt
  positions are False.
- `versions[t]` is the policy version that sampled token t, -1 where the policy did not sample it.
"""

import enum
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from async_rl.core.calls import AgentCall, Alternatives, Span, Support
from async_rl.core.frozen import Value
from async_rl.core.programs import PYTHON, Checker, Language, OutputRules

# int32 holds any token id and any version, in half the bytes of int64 on the wire.
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Branch = tuple[int, int]
"""Start and parent in a row of tokens: the token at `start` follows the token at `parent`, which is
before it, and what that one follows; -1: nothing. Every other token follows its neighbor.
"""

NO_VERSION = -1
"""The value in `versions` where the policy did not write the token."""


class Purpose(enum.StrEnum):
    """The purpose of a group: training data, or an evaluation of the version that wrote it."""

    TRAIN = "train"
    EVAL = "eval"


class GroupState(enum.StrEnum):
    """The one state of a group. `issued` waits for a generator, `leased` is with the learner."""

    ISSUED = "issued"
    GENERATING = "generating"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(enum.StrEnum):
    """The reason why a group was dropped; counted under `failures/<reason>`."""

    OVER_AGE = "over_age"
    GENERATION_FAILED = "generation_failed"
    SCORING_FAILED = "scoring_failed"
    # Not SCORING_FAILED: it fails for every prompt, so the buffer holds tickets back.
    SCORING_OUTAGE = "scoring_outage"
    REWARD_FAILED = "reward_failed"
    GENERATOR_LOST = "generator_lost"
    AGENT_FAILED = "agent_failed"
    NOT_TAKEN = "not_taken"
    UNTRAINABLE = "untrainable"
    NO_SIGNAL = "no_signal"
    # Refused by the buffer (buffer/tickets.py); another attempt follows.
    INVALID = "invalid"


class Verdict(enum.StrEnum):
    """The result of one test of a program. The last two say nothing about the program and are never
    a score; test_error: the test itself is broken.
    """

    PASS = "pass"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    COMPILE_ERROR = "compile_error"
    TEST_ERROR = "test_error"
    INFRASTRUCTURE_ERROR = "infrastructure_error"

    @property
    def is_score(self) -> bool:
        """Return whether the result is the program's."""
        return self not in (Verdict.TEST_ERROR, Verdict.INFRASTRUCTURE_ERROR)


class StdinTest(Value, tag_field="kind", tag="stdin"):
    """Feed `input` on standard input, compare the printed text with `output` by the rules, or let
    the checker decide.
    """

    input: str
    output: str
    rules: OutputRules = OutputRules()
    checker: Checker | None = None

    @property
    def interacts(self) -> bool:
        """Return whether the checker runs next to the program, which is then in Python."""
        return self.checker is not None and self.checker.interacts


class CallTest(Value, tag_field="kind", tag="call"):
    """Call `function` with `args` (plain JSON values), compare the returned value with `expected`.

    types: exact = a tuple is not a list and 1 is not 1.0; json = they are, as JSON cannot express
    the difference; wrapped (APPS) = as json, and a list of one item also stands for that item.
    """

    function: str
    args: list[Any]
    expected: Any
    types: Literal["exact", "json", "wrapped"] = "exact"


class AssertTest(Value, tag_field="kind", tag="assert"):
    """Run assert statements (HumanEval, MBPP) against the program.

    names: that the program defines although Python or the setup has them, such as `sum`.
    """

    code: str
    names: list[str] = []

    @property
    def own(self) -> frozenset[str]:
        """The names, as a set."""
        return frozenset(self.names)


class AnswerTest(Value, tag_field="kind", tag="answer"):
    """Compare a response in words with the expected answer, by a rule of rewards/responses.py; no
    program is run.
    """

    rule: Literal["gsm8k", "math", "exact", "regex"]
    expected: str


# Absolute, without "..": the path is a mount point in the container of a row that a stranger may
# have written.
ContainerPath = Annotated[str, Meta(pattern=r"^(/[\w+@=-][\w.+@=-]*)+$")]


class ContainerTest(Value, tag_field="kind", tag="container"):
    """Run `command` in a container of `image`, an image of the engine or a name in sandbox.rootfs.

    program: file with the program; files: other files, all read-only. prints: standard input and
    the expected output; report: a JUnit report that the command writes; its cases `passing` must
    pass and `failing` fail, each named classname.name. Without both the exit status decides.
    timeout_s: CPU time, of all processes; memory_mb: theirs together.
    """

    # A first character other than "-": the name is an argument of the engine's command line.
    image: Annotated[str, Meta(pattern=r"^[\w][\w./:@-]*$")]
    command: Annotated[list[str], Meta(min_length=1)]
    program: ContainerPath = "/work/solution.py"
    files: dict[ContainerPath, str] = {}
    prints: StdinTest | None = None
    report: ContainerPath | None = None
    passing: list[str] = []
    failing: list[str] = []
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60
    memory_mb: Annotated[int, Meta(ge=16)] = 1024

    def __post_init__(self) -> None:
        if self.prints is not None and self.report is not None:
            raise ValueError("a container test has prints or report, not both")
        if self.report is None and (self.passing or self.failing):
            raise ValueError("passing and failing name cases of a report; give report")


CodeTest = StdinTest | CallTest | AssertTest | AnswerTest | ContainerTest


class CodeProblem(Value, tag_field="type", tag="code"):
    """The hidden side of a prompt. `setup` is code for the tests (imports, helpers); `language`,
    the language of the program.

    row: the whole row as JSON if reward functions score it, else empty. Only then may tests be
    empty.
    """

    tests: list[CodeTest]
    setup: str = ""
    row: str = ""
    language: Language = PYTHON

    @property
    def wants_words(self) -> bool:
        """Return whether the response itself is judged, not a program in it."""
        return all(isinstance(test, AnswerTest) for test in self.tests)


class Prompt(Value):
    """One row of a data set, ready to be sampled from.

    token_ids: int32 [P], with chat template and generation prompt. data_source selects the reward.
    """

    prompt_id: str
    text: str
    token_ids: IntArray
    data_source: str
    problem: CodeProblem


class Sampling(Value):
    """The settings of sampling. temperature 0 is greedy.

    drafts: earlier responses to the prompt, little-endian int32 (generation/vllm/proposer.py).
    """

    temperature: float
    max_new_tokens: int
    support: Support = Support()
    drafts: bytes = b""
    alternatives: Alternatives = Alternatives()


class Ticket(Value):
    """The right to roll out one group, issued by admission.

    group_id grows in order of admission.  attempt counts from 1 and grows each time the ticket is
    issued again, so that a result of an older attempt is recognised and ignored.
    """

    group_id: int
    attempt: int
    purpose: Purpose
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    admitted_version: int


class StepScore(Value):
    """The score of one step of a response, up to its end_tokens-th token (counted from 1)."""

    end_tokens: int
    reward: float


class Score(Value):
    """The verifier's score of one trajectory.

    reward is the task's score before the algorithm scales it; parts are its named components;
    verdicts has one entry per test run; failure is the reason of the first failed test, for
    example "f(3) returned 4, not 9"; steps, where they are scored (reward.placement), are in order.
    """

    reward: float
    parts: dict[str, float]
    verdicts: tuple[Verdict, ...]
    latency_s: float
    steps: tuple[StepScore, ...] = ()
    failure: str = ""

    @property
    def is_passed(self) -> bool:
        """Return whether tests were run and all of them passed."""
        return 0 < len(self.verdicts) == self.verdicts.count(Verdict.PASS)


class SampleFields(Value):
    """The facts about a sample besides its tokens.

    is_truncated: by the length limit. branches: of an agent's session, ascending, after the prompt.
    calls: its answers. spans: of tokens that were not drawn from the whole vocabulary. clock:
    seconds from the start of its group to the first token (NaN: unknown), the last and the score.
    """

    is_truncated: bool
    score: Score
    branches: tuple[Branch, ...] = ()
    clock: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    calls: tuple[AgentCall, ...] = ()


class Trajectory(SampleFields, kw_only=True):
    """One sampled response with its prompt: token_ids int32 [L], loss_mask bool [L],
    behavior_logprobs float32 [L] (0 where not sampled), versions int32 [L].
    """

    token_ids: IntArray
    prompt_length: int
    loss_mask: BoolArray
    behavior_logprobs: FloatArray
    versions: IntArray

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length


class GroupFields(Value):
    """The facts about a group besides its samples."""

    group_id: int
    attempt: int
    prompt_id: str
    purpose: Purpose
    data_source: str
    generator: str
    admitted_version: int
    generation_s: float


class Group(GroupFields, kw_only=True):
    """The trajectories of one ticket: the unit of admission, storage and sampling. baseline: the
    greedy answer.
    """

    trajectories: list[Trajectory]
    baseline: Trajectory | None = None


Role = Literal["supervisor", "buffer", "generator", "gateway", "verifier", "learner"]
