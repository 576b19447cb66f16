"""Processes of a run as the supervisor and its readers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.protocol.control import StatusReply
from async_rl.protocol.membership import Heartbeat, Member


def member(name: str, counters: Mapping[str, float] | None = None, **facts: Any) -> Member:
    """A process at work; its role is the first word of its name."""
    usual = {"pid": 7, "address": "", "state": "working", "waits_for": "", "since_s": 0.0}
    values = {**usual, "version": -1, "role": name.partition("-")[0], **facts}
    return Member(name=name, counters=dict(counters or {}), **values)


def heartbeat(name: str, counters: Mapping[str, float] | None = None, **facts: Any) -> Heartbeat:
    usual = {"pid": 1, "state": "generating", "waits_for": "", "since_s": 0.0, "version": 0}
    return Heartbeat(name=name, counters=dict(counters or {}), **{**usual, **facts})


def reply(members: Sequence[Member] = (), **facts: Any) -> StatusReply:
    """The answer of a run at step 3 of 9."""
    usual = {"run_name": "r", "run_dir": "/r", "step": 3, "num_steps": 9, "started_s": 0}
    values = {**usual, "tensorboard_url": "", "metrics": {}, **facts}
    return StatusReply(members=list(members), **values)
