"""Time limits: three settings, and formulas of all others.

Part of the schema in `run.py`, whose invariants hold here.  The formulas keep the limits in order:
the interval of heartbeats is below the silence after which a process is killed, which is below a
lease.
"""

from async_rl.config.base import PositiveFloat, Section

# 10 tokens/s for 120 s, the default of group_s: a slow engine on a CPU.
_TOKENS_PER_GROUP_S = 1200


class TimeoutsConfig(Section):
    """Time limits in seconds; docs/operations.md explains when to raise them."""

    call_s: PositiveFloat
    """one remote call; the interval of heartbeats is derived from it"""
    start_s: PositiveFloat
    """start of a process without progress; the time limits of a weight push, and of a run without a
    learner step, are derived from it"""
    group_s: PositiveFloat
    """generating and scoring one group of up to 1,200 tokens per sample; in proportion for longer
    ones"""

    def longest_group_s(self, max_tokens: int) -> float:
        """group_s, and for samples above 1,200 tokens in proportion: the bound of every group.

        1,200 tokens in 120 s are 10 tokens/s for each sample, a slow engine.
        """
        return self.group_s * max(1.0, max_tokens / _TOKENS_PER_GROUP_S)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: call_s / 10, at most 1, since status shows their content."""
        return min(1.0, self.call_s / 10)

    @property
    def silence_s(self) -> float:
        """1.5 call_s: a process that sends no heartbeat for this time is killed and restarted.

        Longer than one call, so that a heartbeat whose call timed out can be repeated.
        """
        return 1.5 * self.call_s

    @property
    def lease_s(self) -> float:
        """3 call_s: the ticket of a generator that is not in the member list is issued again after
        this time.

        Twice the silence, so that the supervisor restarts a dead process first and reports it.
        """
        return 3 * self.call_s

    @property
    def orphan_s(self) -> float:
        """6 call_s: a process whose supervisor does not answer for this time exits.

        Four times the silence, because a supervisor whose machine was suspended for a while returns
        with all its children. On the supervisor's machine the kernel kills the children of a dead
        supervisor.
        """
        return 6 * self.call_s

    @property
    def stop_s(self) -> float:
        """start_s / 3: finishing and saving the step after a stop request.

        A checkpoint writes the weights that a start reads, and the optimizer's moments. A run whose
        steps take longer than this needs a higher start_s to finish its last one.
        """
        return self.start_s / 3

    @property
    def push_s(self) -> float:
        """start_s / 3: a generator that has not loaded a push by then is removed.

        A push transfers the weights that a start reads; the rest of a start is imports and warm-up.
        """
        return self.start_s / 3

    @property
    def sleep_s(self) -> float:
        """start_s / 6: a colocated generator that is not asleep by then is removed."""
        return self.start_s / 6

    @property
    def load_functions_s(self) -> float:
        """2/3 start_s: importing reward functions and their models, within a verifier's start."""
        return 2 * self.start_s / 3

    @property
    def restart_window_s(self) -> float:
        """At least 300 s and 2 start_s: the window of supervisor.max_restarts.

        A window shorter than one start would never count two failed starts.
        """
        return max(300.0, 2 * self.start_s)

    @property
    def before_time_limit_s(self) -> int:
        """2 stop_s: the run stops this long before Slurm's limit: one stop and a reserve."""
        return round(2 * self.stop_s)

    @property
    def drain_s(self) -> float:
        """group_s / 4: time for a leaving generator to finish its groups; others are reissued."""
        return self.group_s / 4

    @property
    def score_s(self) -> float:
        """group_s / 4: one scoring call, its wait in the queue included."""
        return self.group_s / 4

    @property
    def function_s(self) -> float:
        """group_s / 12: one call of a reward function, so that it returns within its scoring call
        even if it waits for another that is as slow.
        """
        return self.group_s / 12

    @property
    def stall_s(self) -> float:
        """10 start_s: time without a learner step after which the run fails.

        A generator that restarts delivers nothing for start_s, and its engine may fail to start
        more than once before max_restarts ends the run with a better message.
        """
        return 10 * self.start_s

    @property
    def collective_s(self) -> float:
        """2/3 stall_s: limit of one collective, after which the learner's ranks start again."""
        return 2 * self.stall_s / 3

    @property
    def stall_warning_s(self) -> float:
        """stall_s / 30: time without a learner step after which the cause is reported."""
        return self.stall_s / 30
