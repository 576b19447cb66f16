"""Requests and answers of `POST /verify` and `POST /verify_batch`, for server and client.

A limit that a request leaves out is the server's (its `sandbox` section). A limit of a request is
used as it is, up to the bounds below.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from async_rl.core.frozen import Value
from async_rl.core.programs import PYTHON, Language
from async_rl.core.types import CodeTest, ContainerTest, StdinTest, Verdict

# Several clients share a server: no request may take more of it.
Timeout = Annotated[float, Meta(gt=0, le=300)]
# In addition to the interpreter, as `sandbox.memory_mb`.
MIN_MEMORY_MB = 16
MAX_MEMORY_MB = 65536

SCORE = "score"
"""The part of a function's score that counts."""
Parts = dict[str, float]
"""The named parts of a function's score, "score" among them."""
FunctionScores = dict[str, Parts]
"""Name of a function -> its parts."""
SLOW_S = 0.5
"""A program that runs for longer gives its cell's place to others. Most programs take a hundredth
of this; one that uses its limit up takes ten times as long.
"""


class RewardSample(Value):
    """One sample as a reward function receives it.

    response: the policy's last text, which is judged; transcript: everything after the prompt, of
    all turns and tools, without special tokens; token_ids: of the transcript; is_written: True for
    tokens that the policy wrote; row: of the data file, {} for the embedded task; tests: of the
    row, if it has any; is_truncated: cut by the length limit of max_tokens; language: of the
    program.
    """

    prompt_id: str
    prompt: str
    response: str
    transcript: str
    token_ids: list[int]
    is_written: list[bool]
    data_source: str
    row: dict[str, Any]
    tests: list[CodeTest]
    setup: str
    is_truncated: bool
    max_tokens: int
    language: Language = PYTHON


class VerifyRequest(Value):
    """One program and its tests, or a sample for functions of the verifier's configuration.

    setup: code of the tests, never run with the program.
    """

    code: str
    tests: Annotated[list[CodeTest], Meta(max_length=1000)]
    language: Language = PYTHON
    setup: str = ""
    timeout_s: Timeout | None = None
    memory_mb: Annotated[int, Meta(ge=MIN_MEMORY_MB, le=MAX_MEMORY_MB)] | None = None
    output_kb: Annotated[int, Meta(ge=1, le=262144)] | None = None
    stop_at_first_failure: bool = True
    functions: list[str] = []
    sample: RewardSample | None = None

    def __post_init__(self) -> None:
        # Here and not in Meta: the number of tests may be 0 if there is a sample.
        if not self.tests and self.sample is None:
            raise ValueError(
                "tests is empty, so every program would pass; give at least one - at `$.tests`"
            )
        for index, test in enumerate(self.tests):
            if self.is_command and not isinstance(test, StdinTest):
                raise ValueError(
                    f"programs in {self.language} are judged by tests of kind stdin only, or all in"
                    f" containers - at `$.tests[{index}]`"
                )

    @property
    def is_command(self) -> bool:
        """Return whether the program is in another language than Python, not all in containers."""
        return self.language != PYTHON and not all(
            isinstance(test, ContainerTest) for test in self.tests
        )


class TestResult(Value):
    """The result of one test.

    cpu_s, wall_s: the mean of the tests that ran in the same process; memory_mb: of that process.
    """

    __test__ = False

    verdict: Verdict
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mb: float = 0.0
    message: str = ""


class VerifyResponse(Value):
    """The program's verdict (its first failure, or pass), and one result per test that ran.

    level: of the jail; scores: the named parts of each function's score, "score" among them;
    failure: the reason why there are none, or why no program of the language can be judged.
    """

    verdict: Verdict
    tests: list[TestResult]
    level: int
    scores: FunctionScores = {}
    failure: str = ""


class BatchRequest(Value):
    """Several programs; each is answered by one line when it finishes."""

    requests: Annotated[list[VerifyRequest], Meta(min_length=1, max_length=1024)]


class BatchLine(Value):
    """One line of the answer to a batch: the response to request `index`."""

    index: int
    response: VerifyResponse


class Health(Value):
    """The answer of `GET /health`. queued: programs that wait; running: programs in a cell;
    verdicts: programs judged, by verdict; refused: requests that found the queue full.
    """

    status: Literal["ok", "draining"]
    level: int
    cells: int
    queued: int
    running: int
    verdicts: dict[Verdict, int]
    refused: int
    cells_replaced: int
    reasons: list[str]


class ErrorReply(Value):
    """The body of every 4xx and 5xx."""

    error: str
