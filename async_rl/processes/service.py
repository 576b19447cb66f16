"""The programs of a training service, in place of the learner and the gateway of a run.

No other run imports them.
"""

from async_rl.runtime.context import ProcessContext


async def run(context: ProcessContext) -> None:
    """Serve programs, or execute their requests, until the process has to stop."""
    if context.role == "gateway":
        from async_rl.service import front

        await front.serve(context)
        return
    # The gateway has no GPU, and needs neither optimizers nor checkpoints.
    from async_rl.service import serving
    from async_rl.training.device import learner_device

    await serving.serve(context, learner_device(context.config.learner.gpus_each))
