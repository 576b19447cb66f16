"""The text of one held-out sample on TensorBoard's text page."""

from __future__ import annotations

import msgspec
from buffer_support import FakePrompts, make_group

from async_rl.buffer.evaluation import sample_text, training_texts
from async_rl.core.types import Purpose, Sampling, Ticket


def test_a_sample_is_told_with_its_reward_parts_verdicts_and_versions() -> None:
    prompt = FakePrompts().prompt(Purpose.EVAL, 0)
    ticket = Ticket(
        group_id=1,
        attempt=1,
        purpose=Purpose.EVAL,
        prompt=prompt,
        num_samples=1,
        sampling=Sampling(temperature=1, max_new_tokens=4),
        admitted_version=4,
    )
    group = make_group(ticket, versions=[4, 4, 5])
    score = msgspec.structs.replace(
        group.trajectories[0].score, parts={"tests_passed": 0.5, "compiles": 1.0}
    )
    group = msgspec.structs.replace(
        group, trajectories=[msgspec.structs.replace(group.trajectories[0], score=score)]
    )
    head = sample_text(prompt.text, group, lambda ids: f"{len(ids)} tokens").splitlines()[0]
    assert head == "**e0**: reward 1, compiles 1, tests_passed 0.5 (pass), written by version 4, 5"
    page = training_texts([group, group], lambda ids: f"{len(ids)} tokens")["samples/training"]
    assert page.count(head) == 2
    assert f"{group.trajectories[0].prompt_length} tokens" in page
