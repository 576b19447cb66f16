"""The likeliest tokens of answers and prompts in the forms of the APIs. tests/generation compares
the log-probs of the engines with those of the weights.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
from clients_support import Clients, use, user
from sessions_support import Policy

from async_rl.protocol.generator import Completion, Scores
from async_rl.sessions.session import Session

TOP = ([[1, 0], [2, 1]], [[-1.0, -2.0], [-3.0, -np.inf]])
BEFORE = ([[0, 0], [2, 1]], [[np.nan, np.nan], [-4.0, -0.5]])


def scores(ids: Any, logprobs: Any) -> Scores:
    return Scores(ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32))


class Scored:
    """A policy that writes a token and its end, with the log-probs that a call reads."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.num_top: list[int] = []

    async def __call__(
        self, name: str, before: Any, limit: int, support: Any, shown: Any
    ) -> Completion:
        self._policy.say("go")
        done = await self._policy(name, before, limit, support, shown)
        self.num_top.append(shown.num_top)
        has_prompt = shown.num_prompt_top is not None
        return msgspec.structs.replace(
            done, likeliest=scores(*TOP), prompt=scores(*BEFORE) if has_prompt else None
        )


def pairs(each: Any) -> list[tuple[str, float]]:
    return [(top.token, top.logprob) for top in each.top_logprobs]


def test_alternatives_come_in_the_forms_of_the_apis() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        session.write = write = Scored(policy)
        name = session.chat.text_of_token
        expected = [[(name(1), -1), (name(0), -2)], [(name(2), -3), (name(1), -9999)]]
        how: Any = {"model": "policy", "messages": [user("go")], "logprobs": True}
        chat = await found.openai.chat.completions.create(**how, top_logprobs=2)
        shown: Any = chat.choices[0].logprobs
        assert [pairs(each) for each in shown.content] == expected
        text = await found.openai.completions.create(model="policy", prompt="go", logprobs=2)
        shown = text.choices[0].logprobs
        for token, found_here, tops in zip(shown.tokens, shown.top_logprobs, expected, strict=True):
            assert set(found_here) == {token, *dict(tops)}
            assert {n: found_here[n] for n, _ in tops} == dict(tops)
        response = await found.openai.responses.create(model="policy", input="go", top_logprobs=2)
        item: Any = response.output[0]
        assert [pairs(each) for each in item.content[0].logprobs] == expected
        body = {"token_ids": [1], "sampling_params": {"logprobs": 2}}
        reply = (await found.http.post("/inference/v1/generate", json=body)).json()
        content = reply["choices"][0]["logprobs"]["content"]
        ids = [[top["token_id"] for top in each["top_logprobs"]] for each in content]
        assert ids == TOP[0]
        # As clients of vLLM send it.
        for value, num_top in ((True, 1), (False, 0)):
            body = {"model": "policy", "prompt": "go", "logprobs": value}
            (choice,) = (await found.http.post("/v1/completions", json=body)).json()["choices"]
            assert (choice["logprobs"] is None, write.num_top[-1]) == (not value, num_top)
        assert write.num_top == [2, 2, 2, 2, 1, 0]
        refused = await found.http.post("/v1/chat/completions", json={**how, "top_logprobs": 21})
        assert refused.status_code == 400

    use(agent)


def test_the_log_probs_of_a_prompt_come_in_the_form_of_vllm() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        session.write = Scored(policy)
        name = session.chat.text_of_token
        expected = [
            None,
            {
                "2": {"logprob": -4, "rank": None, "decoded_token": name(2)},
                "1": {"logprob": -0.5, "rank": 1, "decoded_token": name(1)},
            },
        ]
        more: Any = {"model": "policy", "prompt_logprobs": 1}
        body = {**more, "messages": [user("go")]}
        reply = (await found.http.post("/v1/chat/completions", json=body)).json()
        assert reply["prompt_logprobs"] == expected
        text = (await found.http.post("/v1/completions", json={**more, "prompt": "go"})).json()
        assert text["choices"][0]["prompt_logprobs"] == expected
        params = {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}
        reply = (await found.http.post("/inference/v1/generate", json=params)).json()
        assert reply["prompt_logprobs"] == expected
        stream = await found.http.post("/v1/chat/completions", json={**body, "stream": True})
        first = stream.text.partition("\n")[0].removeprefix("data: ")
        assert json.loads(first)["prompt_logprobs"] == expected
        # 4,000 times 17 values.
        wrong = {"token_ids": [1] * 4000, "sampling_params": {"prompt_logprobs": 16}}
        refused = await found.http.post("/inference/v1/generate", json=wrong)
        assert refused.status_code == 400
        assert "prompt_logprobs" in refused.json()["error"]["message"]

    use(agent)
