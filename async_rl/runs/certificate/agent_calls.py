"""The statement about the calls of agents: each answer that the policy gave is trained, or left out
for a reason.

Evidence: the ledger. A session counts its answers apart from its record, of which the row of tokens
and the trained calls are made. Pure.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from async_rl.runs.certificate.statements import Statement, statement

CALLS = (
    "SELECT group_id, state, reason, num_trained_tokens, calls AS 'calls [stored_json]' FROM groups"
    " WHERE purpose='train' AND calls != '[]'"
)
"""The groups of agents that were complete."""


def agent_calls(groups: Iterable[tuple[int, str, str, int, list[Any]]]) -> Statement:
    """Return the statement. groups: as CALLS selects them."""
    broken = []
    num_unknown = 0
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    for group_id, state, reason, num_trained, samples in groups:
        # Groups of earlier versions have no numbers.
        if not all(call["of"] for calls in samples for call in calls) or not all(samples):
            num_unknown += 1
            continue
        place = f"group {group_id}"
        num_tokens = 0
        for number, calls in enumerate(samples):
            missing = {at: "" for at in range(1, calls[0]["of"] + 1)}
            for call in calls:
                del missing[call["number"]]
                why = call["left_out"]
                if call["end_tokens"]:
                    num_tokens += call["num_tokens"]
                    why = "" if state == "trained" else reason or "open"
                elif not why:
                    missing[call["number"]] = f" (role {call['role']!r})"
                    why = "lost"
                ends[call["role"]][why] += 1
            broken += [
                f"{place}, sample {number}: call {at} of {calls[0]['of']}{role} is neither trained"
                " nor left out"
                for at, role in sorted(missing.items())
            ]
        if num_tokens != num_trained:
            broken.append(
                f"{place}: {num_trained} tokens are trained, of which its calls wrote {num_tokens}"
            )
    evidence = []
    for role, found in sorted(ends.items()):
        trained = found.pop("", 0)
        left = ", ".join(f"{why}: {number}" for why, number in sorted(found.items()))
        total = found.total()
        evidence.append(
            f"role {role!r}: {total + trained} served, {trained} trained, {total} left out ({left})"
        )
    return statement(
        "calls",
        "each answer to an agent is trained, or left out for a reason",
        broken=broken,
        unknown=[f"{num_unknown} groups have no numbers of calls"] if num_unknown else (),
        evidence=evidence,
    )
