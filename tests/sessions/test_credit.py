"""Rewards of single calls and of roles, and calls that are not trained: from requests of an agent
to the advantage of each token.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import torch
from clients_support import Clients, user, using
from composing import compose
from sessions_support import Policy, group_with, sample_of
from tables import table

from async_rl.batching.batch import collate_part, whole
from async_rl.core.errors import AgentError
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Group
from async_rl.learner.models import PolicyOutput, Values
from async_rl.learner.objective import compute_targets, trained_mask
from async_rl.learner.objective_state import Moments
from async_rl.rollouts.agents import credited
from async_rl.rollouts.conversation import Written
from async_rl.rollouts.groups import with_common_prompt
from async_rl.runs.certificate.handed_out import agent_calls
from async_rl.sessions.session import Session

UNTRAINED = {"X-Async-RL-Train": "false"}


async def ask(found: Clients, text: str, model: str = "policy", **headers: str) -> str:
    """Send one message; return the id of the answer."""
    reply = await found.openai.chat.completions.create(
        model=model, messages=[user(text)], extra_headers=headers
    )
    return reply.id


async def pay(found: Clients, session: Session, reward: Any) -> int:
    key = {"authorization": f"Bearer {session.session_key}"}
    reply = await found.http.post("/v1/session/reward", json=reward, headers=key)
    return reply.status_code


async def plans_and_judges(found: Clients, session: Session, policy: Policy) -> None:
    await ask(found, "plan", "policy/planner")
    first = await ask(found, "solve", "policy/solver")
    await ask(found, "judge", **UNTRAINED)
    await ask(found, "again", **{"X-Async-RL-Role": "solver"})
    assert await pay(found, session, {"call": first, "reward": 0.75}) == 200
    assert await pay(found, session, {"role": "planner", "reward": {"brief": 0.25}}) == 200
    assert await pay(found, session, 1.0) == 200


async def solves_at_once(found: Clients, session: Session, policy: Policy) -> None:
    await ask(found, "plan", "policy/planner")
    await ask(found, "judge", "policy/judge:untrained")
    await ask(found, "solve", "policy/solver")
    assert await pay(found, session, 0.0) == 200


async def group_of(*agents: Any) -> Group:
    """One sample of each agent, as the learner receives the group."""
    samples = []
    for agent in agents:
        async with using(["a b", "c", "d e f", "g"]) as (found, session, policy):
            await agent(found, session, policy)
        tokens, branches, ends = session.record.row()
        calls = credited(session, ends)
        done = Written(tokens=tokens, answer="", transcript="", branches=branches, calls=calls)
        reward = sum(sum(reward.parts.values()) for reward in session.rewards)
        samples.append(sample_of(session.record.prompt, done, reward))
    return read_group(pack_group(group_with(with_common_prompt(samples)))).unpacked()


def by_call(group: Group, *settings: str) -> list[list[list[float]]]:
    """The advantages of the tokens of each trained call, in the order of the requests."""
    config = compose("grpo_code", ["rollout.fn=[agent]", *settings])
    batch = collate_part(whole([group]), device=torch.device("cpu"))
    nothing = torch.zeros(batch.num_tokens)
    values = Values(nothing, torch.zeros(batch.num_sequences))
    outputs = PolicyOutput(nothing, nothing, ref_logprobs=None, kl=None, values=values)
    mask = trained_mask(batch, version=0, config=config)
    how: Any = {"config": config, "kl_coef": 0.0, "moments": Moments()}
    targets = compute_targets(batch, mask, outputs, **how)
    found = []
    for number, sample in enumerate(group.trajectories):
        offset = batch.offsets[number]
        spans = [(call.end_tokens - call.num_tokens, call.end_tokens) for call in sample.calls]
        own = targets.advantages[offset : offset + sample.response_length]
        found.append([own[start:end].tolist() for start, end in spans if end])
        # Nothing else has an advantage.
        assert own.count_nonzero() == sum(map(np.count_nonzero, map(np.array, found[-1])))
    return found


async def test_calls_and_roles_have_returns_and_advantages_of_their_own() -> None:
    group = await group_of(plans_and_judges, solves_at_once)
    assert [[(c.role, c.reward, c.num_tokens) for c in s.calls] for s in group.trajectories] == [
        [("planner", 0.25, 4), ("solver", 0.75, 2), ("", 0.0, 6), ("solver", 0.0, 2)],
        [("planner", 0.0, 4), ("judge", 0.0, 2), ("solver", 0.0, 6)],
    ]
    assert not group.trajectories[0].calls[2].end_tokens, "the judge is not trained"
    # With gamma 1/2: returns of the solver 0.75 + 1/2 and 1, mean 1.125; and 0. Of the planner
    # 0.25 + 1; and 0.
    assert by_call(group, "algorithm=dr_grpo", "algorithm.advantage.gamma=0.5") == [
        [[0.625] * 4, [1.25 - 0.5625] * 2, [1 - 0.5625] * 2],
        [[-0.625] * 4, [-0.5625] * 6],
    ]
    # rloo compares with the mean return of the other sample, here 0.
    assert by_call(group, "algorithm=rloo", "algorithm.advantage.gamma=0.5") == [
        [[1.25] * 4, [1.25] * 2, [1.0] * 2],
        [[-1.25] * 4, [-1.125] * 6],
    ]


async def test_a_role_has_the_returns_of_its_own_tokens() -> None:
    group = await group_of(plans_and_judges, solves_at_once)
    # Per token: the reward at the last token of a call, the whole reward at the last of each role.
    gamma = "algorithm.advantage.gamma=0.5"
    solver = [0.75 * 0.5 + 0.125, 0.75 + 0.25, 0.5, 1.0]
    planner = [1.25 / 8, 1.25 / 4, 1.25 / 2, 1.25]
    expected = [[planner, solver[:2], solver[2:]], [[0.0] * 4, [0.0] * 6]]
    plain = "algorithm.normalize_advantages=none"
    assert by_call(group, "algorithm.advantage=reinforce_plus_plus", gamma, plain) == expected
    of_critic = ("algorithm=ppo", gamma, "algorithm.advantage.gae_lambda=1", plain)
    assert by_call(group, *of_critic) == expected


def certified(group: Group, state: str = "trained", reason: str = "") -> tuple[str, list[str]]:
    """The verdict on the calls of a group, as its row in the ledger has them, and the evidence."""
    calls = msgspec.to_builtins([sample.calls for sample in group.trajectories])
    num_trained = sum(int(sample.loss_mask.sum()) for sample in group.trajectories)
    found = agent_calls([(7, state, reason, num_trained, calls)])
    return str(found.verdict), found.evidence


async def test_the_certificate_accounts_for_each_call_and_names_a_lost_one() -> None:
    async def repeats(found: Clients, session: Session, policy: Policy) -> None:
        first = await ask(found, "plan", "policy/planner")
        session.forget(session.names[first])
        await ask(found, "plan", "policy/planner")

    group = await group_of(plans_and_judges, repeats)
    assert certified(group) == (
        "holds",
        [
            "role '': 1 served, 0 trained, 1 left out (requested: 1)",
            "role 'planner': 3 served, 2 trained, 1 left out (unread: 1)",
            "role 'solver': 2 served, 2 trained, 0 left out ()",
        ],
    )
    _, evidence = certified(group, "dropped", "too_stale")
    assert evidence[-1] == "role 'solver': 2 served, 0 trained, 2 left out (too_stale: 2)"

    (sample, _) = group.trajectories
    cut = msgspec.structs.replace(sample, calls=sample.calls[:-1])
    verdict, evidence = certified(msgspec.structs.replace(group, trajectories=[cut]))
    assert verdict == "broken"
    assert evidence[:2] == [
        "group 7, sample 0: call 4 of 4 is neither trained nor left out",
        "group 7: 8 tokens are trained, of which its calls wrote 6",
    ]


async def test_without_rewards_of_calls_a_sample_has_one_advantage() -> None:
    async def twice(found: Clients, session: Session, policy: Policy) -> None:
        await ask(found, "one")
        await ask(found, "two")
        await pay(found, session, 1.0)

    async def once(found: Clients, session: Session, policy: Policy) -> None:
        await ask(found, "one")
        await pay(found, session, 0.0)

    group = await group_of(twice, once, once)
    # Mean 1/3, and a deviation of sqrt(1/3), as if each sample were one call.
    high = (2 / 3) / (1 / 3) ** 0.5
    found = by_call(group, "algorithm=grpo")
    assert found[0] == [[pytest.approx(high, rel=1e-5)] * n for n in (4, 2)]
    assert found[1] == [[pytest.approx(-high / 2, rel=1e-5)] * 4]


async def test_an_answer_that_is_not_trained_has_limits_of_its_own() -> None:
    async with using(["a b", "c", "d e f"]) as (found, session, _):
        session.max_turns = 2
        session.limit = 40
        await ask(found, "one", **UNTRAINED)
        assert session.record.num_tokens() == 0
        await ask(found, "two")
        used = session.record.num_tokens()
        await ask(found, "x " * 8, "policy:untrained")
        assert session.record.num_tokens() == used
        with pytest.raises(openai.BadRequestError, match=r"rollout\.max_turns"):
            await ask(found, "x", **UNTRAINED)
        session.max_turns = 3
        with pytest.raises(openai.BadRequestError, match="would start with"):
            await ask(found, "y " * 40, **UNTRAINED)
        assert not session.is_truncated
        assert session.last_text == "c", "the newest trained answer is scored"


async def test_a_trained_answer_may_continue_one_that_is_not() -> None:
    async with using(["a", "b", "c"]) as (found, session, _):
        history: list[Any] = []
        for headers in ({}, UNTRAINED, {}):
            history.append(user("go"))
            reply = await found.openai.chat.completions.create(
                model="policy", messages=history, extra_headers=headers
            )
            history.append(reply.choices[0].message)
    tokens, branches, ends = session.record.row()
    assert len(branches) == 1
    assert session.chat.decode(tokens.token_ids[tokens.is_written]) == "ac"
    assert (list(ends), ends[2]) == ([0, 2], len(tokens.token_ids))


@pytest.mark.parametrize(("reward", "status", "reason"), table(__file__, "rewards_of_what_is_not"))
async def test_rewards_of_what_is_not_trained_are_refused(
    reward: Mapping[str, Any], status: int, reason: str
) -> None:
    async with using(["a", "b"]) as (found, session, _):
        await ask(found, "one")
        judge = await ask(found, "two", **UNTRAINED)
        text = msgspec.json.encode(reward).replace(b"$judge", judge.encode())
        assert await pay(found, session, msgspec.json.decode(text)) == status
    refused = pytest.raises(AgentError, match=reason) if reason else contextlib.nullcontext()
    with refused:
        credited(session, session.record.row()[2])


async def test_headers_that_say_nothing_are_refused() -> None:
    async with using() as (found, *_):
        for headers in ({"X-Async-RL-Train": "no"}, {"X-Async-RL-Role": "a/b"}):
            with pytest.raises(openai.BadRequestError, match="x-async-rl-role is"):
                await ask(found, "one", **headers)
