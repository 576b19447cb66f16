"""The tree of errors that async_rl raises on purpose.

    AsyncRLError
    |- ConfigError, ProtocolError, EngineDead, StalenessError
    |- DataError
    |  |- PromptTooLong
    |- RunFailed
    |- RestartNeeded
    |  |- Superseded
    |- InfrastructureError
    |  |- DeadlineExceeded, Unavailable, Unsupported
    |- RewardError
    |  |- BrokenTest
    |- AgentError
    |  |- NotTaken
    |- WeightsError
    |  |- BlockUnreachable, BaseMissing
    |  |- BroadcastBroken
    |     |- SenderLate
    |- NonFiniteError
    |  |- PartlyTrained

Every message says what happened, the value, and what to do about it.
"""

import contextlib
import traceback
from collections.abc import Iterator


class AsyncRLError(Exception):
    """Base of every error that async_rl raises on purpose."""


class ConfigError(AsyncRLError):
    """A setting is wrong. The message names path, value and remedy; no process has started yet."""


class DataError(AsyncRLError):
    """A data file or a row of it cannot be used. The message names file and row."""


class PromptTooLong(DataError):
    """A row whose prompt has more than data.max_prompt_tokens."""


class InfrastructureError(AsyncRLError):
    """Something around the policy failed; the work is retried and never scored."""


class DeadlineExceeded(InfrastructureError):
    """A remote call or a wait ran past its deadline."""


class Unavailable(InfrastructureError):
    """The peer cannot be reached, or has not started."""


class Unsupported(InfrastructureError):
    """This machine cannot judge such a program: a compiler, engine or image is missing."""


class RewardError(AsyncRLError):
    """A reward function raised, hung or exited, or returned no score (reward.stop_on)."""


class BrokenTest(RewardError):
    """A row's own test is broken, so its prompt cannot be scored."""


class AgentError(AsyncRLError):
    """An agent's environment failed, or left its sample without a reward; never a score."""


class NotTaken(AgentError):
    """No program outside the run took the session of a sample in time."""


class ProtocolError(AsyncRLError):
    """A peer sent a message that the schema does not allow."""


class WeightsError(AsyncRLError):
    """A weight push failed, or an engine holds weights that it should not hold."""


class BlockUnreachable(WeightsError):
    """The shared block cannot be opened from here; the engine is as it was."""


class BaseMissing(WeightsError):
    """Changes of the weights do not fit the weights that the generator holds; the engine is as it
    was, and the learner sends all weights.
    """


class BroadcastBroken(WeightsError):
    """The members of a communicator did not all come, or one was lost; the received part is
    deleted, and the broadcast is repeated without the lost member.
    """


class SenderLate(BroadcastBroken):
    """The learner itself was too slow for a broadcast; the members try again, and none is lost."""


class EngineDead(AsyncRLError):
    """A generation engine exited, or its state is unknown; its process has to end."""


class StalenessError(AsyncRLError):
    """A batch would break the staleness bound."""


class NonFiniteError(AsyncRLError):
    """A loss, a gradient or a log-prob is not finite."""


class PartlyTrained(NonFiniteError):
    """As NonFiniteError, after updates of the same step: these weights belong to no version."""


class RestartNeeded(AsyncRLError):
    """The process has to start again from its last saved state; this is not a failure."""


class Superseded(RestartNeeded):
    """A newer life of the process has taken over, so this one has to end. The newer life may be the
    older process, if its first message was late: then the supervisor starts this one again.
    """


class SupervisorLost(DeadlineExceeded, RestartNeeded):
    """The supervisor does not answer. If it still runs, the network between the two was cut, and it
    starts the process again.
    """


class RunFailed(AsyncRLError):
    """The run stopped before its goal; the message starts with the process and its root cause."""


def require_life(life: int, newest: int) -> None:
    """Raise Superseded for a life of the learner before the newest one."""
    if life < newest:
        raise Superseded(f"life {life} of the learner is refused: life {newest} runs; end it")


@contextlib.contextmanager
def at(origin: str) -> Iterator[None]:
    """Let a DataError of the block start with the position in the data, such as `file, row 7`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{origin}: {error}") from error


def raised_at(error: BaseException) -> str:
    """Return the line that raised, for the author of a plug-in: ` (FILE:LINE)`, or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def root_cause(error: BaseException) -> BaseException:
    """The first ordinary exception inside nested exception groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
