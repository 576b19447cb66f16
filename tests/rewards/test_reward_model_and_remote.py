"""The ready terms with a scorer outside: a reward model with its chat template, and an HTTP server
in two forms.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from composing import compose
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)
from verifier_support import TOKEN, serve, verifier, verifier_process

from async_rl.config.base import replace
from async_rl.config.rewards import RemoteTerm, RewardModelTerm
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.types import CallTest, StdinTest
from async_rl.rewards.functions import RemoteScorer, RemoteVerifier
from async_rl.rewards.models import RewardModel
from async_rl.rewards.verifier.protocol import RewardSample
from benchmarks.embedded.vocabulary import build_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


def sample(response: str, **fields: Any) -> RewardSample:
    made = RewardSample(
        prompt_id="p", prompt="rendered prompt", response=response, transcript=response,
        token_ids=[1], is_written=[True],
        data_source="code", row={"prompt": [{"role": "system", "content": "be brief"},
        {"role": "user", "content": "ask"}]},
        tests=[CallTest(function="f", args=[i], expected=i) for i in (1, 2)], setup="",
        is_truncated=False, max_tokens=9,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward_model")
    tokenizer: Any = build_tokenizer(["ask yes no be brief <user> <assistant> <system>"], 512)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForSequenceClassification(shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def settings(path: Path, **fields: Any) -> RewardModelTerm:
    knobs = ["reward.terms.mine=reward_model", f"reward.terms.mine.path={path}"]
    term = compose("grpo_code", knobs).reward.terms["mine"]
    assert isinstance(term, RewardModelTerm)
    return replace(term, **fields)


def by_hand(path: Path, text: str, *, max_tokens: int = 2048) -> float:
    """One sequence at a time, without padding."""
    ids = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False)["input_ids"][
        :max_tokens
    ]
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def ask(config: RewardModelTerm, samples: list[RewardSample]) -> list[float]:
    async def run() -> list[float]:
        model = RewardModel(config, "reward.terms.mine")
        return list(await asyncio.gather(*map(model, samples)))

    return asyncio.run(run())


ANSWERS = ("yes", "no, and here is a longer answer than the others", "")


@pytest.mark.covers("return_raw_input_ids, return_raw_chat")
def test_the_reward_model_reads_prompt_and_response_in_its_own_template(model_path: Path) -> None:
    texts = [f"<system> be brief\n<user> ask\n<assistant> {answer}\n" for answer in ANSWERS]
    expected = [by_hand(model_path, text) for text in texts]
    assert len(set(expected)) == 3
    for batch_size in (1, 2, 16):
        found = ask(
            settings(model_path, batch_size=batch_size), [sample(answer) for answer in ANSWERS]
        )
        assert found == pytest.approx(expected, abs=1e-5)
    plain = ask(settings(model_path), [sample("yes", row={})])
    assert plain == pytest.approx(
        [by_hand(model_path, "<user> rendered prompt\n<assistant> yes\n")], abs=1e-5
    )


def test_what_is_over_max_tokens_is_cut_at_the_end(model_path: Path) -> None:
    text = "<system> be brief\n<user> ask\n<assistant> yes\n"
    assert ask(settings(model_path, max_tokens=8), [sample("yes")]) == pytest.approx(
        [by_hand(model_path, text, max_tokens=8)], abs=1e-5
    )


def test_bias_scale_and_clip_are_applied_in_this_order(model_path: Path) -> None:
    (raw,) = ask(settings(model_path), [sample("yes")])
    assert ask(settings(model_path, bias=raw - 0.5, scale=3.0), [sample("yes")]) == pytest.approx(
        [1.5], abs=1e-5
    )
    assert ask(settings(model_path, bias=raw + 0.5, scale=3.0, clip=1.0), [sample("yes")]) == [-1.0]


def test_a_model_that_cannot_score_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.terms\.mine\.path=.*: cannot be loaded"):
        RewardModel(settings(tmp_path), "reward.terms.mine")
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    AutoModelForSequenceClassification.from_pretrained(model_path).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template"):
        RewardModel(settings(tmp_path), "reward.terms.mine")


def run_config(**fields: Any) -> RunConfig:
    config = compose("grpo_code", ["verifiers.cells=1", "sandbox.packages=[]"])
    return replace(config, reward=replace(config.reward, **fields))


def test_a_verifier_loads_the_model_where_the_configuration_asks_for_it(model_path: Path) -> None:
    async def run() -> float:
        async with (
            asyncio.timeout(120),
            verifier_process(run_config(terms={"reward_model": settings(model_path)})) as client,
        ):
            return (await client.ask_functions(["reward_model"], sample("yes")))["reward_model"][
                "score"
            ]

    assert asyncio.run(run()) == pytest.approx(
        ask(settings(model_path), [sample("yes")])[0], abs=1e-5
    )


def remote(url: str, **fields: Any) -> RemoteTerm:
    knobs = ["reward.terms.mine=remote", f"reward.terms.mine.url={url}"]
    term = compose("grpo_code", knobs).reward.terms["mine"]
    assert isinstance(term, RemoteTerm)
    return replace(term, **fields)


@asynccontextmanager
async def scoring(term: RemoteTerm, *, limit_s: float = 10) -> AsyncIterator[RemoteScorer]:
    scorer = RemoteScorer(term, limit_s=limit_s)
    try:
        yield scorer
    finally:
        await scorer._http.aclose()


def from_server(
    answer: Callable[[int, dict[str, Any], Request], Response], **fields: Any
) -> tuple[Any, int]:
    """(what the scorer says, or its error; how often the server was asked). answer: (number of the
    question, its body, it) -> reply.
    """
    num_asked = 0

    async def handle(request: Request) -> Response:
        nonlocal num_asked
        num_asked += 1
        return answer(num_asked, await request.json(), request)

    async def run() -> Any:
        app = Starlette(routes=[Route("/score", handle, methods=["POST"])])
        async with serve(app) as url, scoring(remote(f"{url}/score", **fields)) as scorer:
            try:
                return await scorer(sample("yes"))
            except RewardError as error:
                return str(error)

    return asyncio.run(run()), num_asked


def test_a_plain_server_gets_the_sample_and_gives_a_number_or_parts() -> None:
    def answer(_: int, body: dict[str, Any], __: Request) -> Response:
        assert (body["response"], body["prompt_id"], body["row"]["prompt"][1]["content"]) == (
            "yes",
            "p",
            "ask",
        )
        return JSONResponse({"score": 0.5, "tone": 2})

    assert from_server(answer) == ({"score": 0.5, "tone": 2}, 1)
    assert from_server(lambda *_: JSONResponse(0.25)) == (0.25, 1)


def test_a_server_that_fails_is_asked_again_up_to_its_attempts() -> None:
    def second_time(number: int, _: dict[str, Any], __: Request) -> Response:
        return JSONResponse(1.0) if number > 1 else Response("busy", 503)

    assert from_server(second_time, attempts=2) == (1.0, 2)
    said, asked = from_server(second_time, attempts=1)
    assert asked == 1
    assert "gave no score in 1 attempts" in said
    said, asked = from_server(lambda *_: Response("no such model", 404), attempts=3)
    assert (asked, "refused the sample (404): no such model" in said) == (1, True)
    said, asked = from_server(lambda *_: Response("not json"), attempts=2)
    assert (asked, "DecodeError" in said) == (2, True)


async def test_a_server_that_does_not_answer_is_given_up_within_the_limit_of_one_call() -> None:
    ending = asyncio.Event()
    calls = set()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The loop refers to tasks weakly: one that waits for nothing else may be collected.
        calls.add(asyncio.current_task())
        await ending.wait()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(20):
            async with scoring(remote(url, attempts=2), limit_s=0.6) as scorer:
                with pytest.raises(RewardError) as failed:
                    await scorer(sample("yes"))
    finally:
        server.close()
        ending.set()
        await asyncio.gather(*calls, return_exceptions=True)
    assert "ReadTimeout" in str(failed.value)


def test_the_token_is_sent_from_the_environment_and_missed_where_it_is_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCORE_TOKEN", "mine")

    def answer(_: int, __: dict[str, Any], request: Request) -> Response:
        return JSONResponse({"sent": float(request.headers.get("authorization") == "Bearer mine")})

    assert from_server(answer, token_env="SCORE_TOKEN")[0] == {"sent": 1.0}
    assert from_server(answer)[0] == {"sent": 0.0}
    with pytest.raises(
        ConfigError,
        match=r"token_env=NOT_SET of http://127.0.0.1:1: there is no such environment variable",
    ):
        RemoteScorer(remote("http://127.0.0.1:1", token_env="NOT_SET"), limit_s=10)


def test_another_verifier_judges_the_rows_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SCORE_TOKEN", TOKEN)

    async def run() -> list[Any]:
        async with verifier() as (url, _):
            programs = (
                "def f(x):\n    return x",
                "def f(x):\n    return 1",
                "```python\nunfinished",
            )
            term = remote(url, form="verifier", token_env="SCORE_TOKEN")
            scorer = RemoteVerifier(term, "auto", limit_s=10)
            scores = [await scorer(sample(program)) for program in programs]
            tests = [StdinTest(input="", output="3\n")]
            echo = sample("```sh\necho $((1 + 2)) | cat\n```", tests=tests, language="shell")
            scores.append(await scorer(echo))
            await scorer.pool.close()
            return scores

    assert asyncio.run(run()) == [1.0, 0.5, 0.0, 1.0]
