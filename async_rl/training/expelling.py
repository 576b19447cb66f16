"""Have the supervisor end generators that missed a push or do not release the device."""

from __future__ import annotations

from async_rl.core.errors import AsyncRLError, WeightsError
from async_rl.protocol.membership import Expel
from async_rl.runtime.context import ProcessContext
from async_rl.weights.membership import Life, life_of


async def expel(context: ProcessContext, lives: set[Life], reason: str) -> None:
    """Expel those of `lives` that still serve; the supervisor starts them again.

    Raises WeightsError if the supervisor does not answer: a generator with old weights or on the
    learner's device must not continue.
    """
    serving = {life_of(member) for member in context.directory.of_role("generator")}
    for name, pid in lives & serving:
        context.activity.count("failures/generator_cut_off", 1)
        request = Expel(name=name, pid=pid, reason=reason)
        try:
            await context.supervisor.call(request, timeout_s=context.config.timeouts.call_s)
        except AsyncRLError as error:
            raise WeightsError(
                f"{name} missed a push ({reason}) and could not be removed from the run: {error}"
            ) from error
