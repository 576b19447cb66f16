"""The ready terms with a scorer outside: a reward model with its chat template, and an HTTP server
in two forms.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import compose
from rewards_support import TOKEN, Served, calls, sample_of, serve
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

from async_rl.config.rewards import RemoteTerm, RewardConfig
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.types import StdinTest
from async_rl.rewards.functions import RemoteScorer, RemoteVerifier, find_function
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.wire.http import listen, url_of
from benchmarks.embedded.vocabulary import build_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ask"}]


def sample(response: str, **fields: Any) -> RewardSample:
    given = {"prompt": "rendered prompt", "row": {"prompt": CHAT}, "tests": calls(0, 1)}
    return sample_of(response, **given | fields)


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


def reward_by(kind: str, **fields: Any) -> RewardConfig:
    given = [f"reward.terms.mine.{name}={value}" for name, value in fields.items()]
    return compose("grpo_code", [f"reward.terms.mine={kind}", *given]).reward


def remote(url: str, **fields: Any) -> RemoteTerm:
    term = reward_by("remote", url=url, **fields).terms["mine"]
    assert isinstance(term, RemoteTerm)
    return term


def ask(path: Path, *samples: RewardSample, **fields: Any) -> list[float]:
    async def run() -> list[float]:
        model = find_function("mine", reward_by("reward_model", path=path, **fields), limit_s=1)
        return list(await asyncio.gather(*map(model, samples)))

    return asyncio.run(run())


def by_hand(path: Path, text: str, *, max_tokens: int = 2048) -> float:
    """One sequence at a time, without padding."""
    found = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False)
    ids = found["input_ids"][:max_tokens]
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


ANSWERS = ("yes", "no, and here is a longer answer than the others", "")


@pytest.mark.covers("return_raw_input_ids, return_raw_chat")
def test_the_reward_model_reads_prompt_and_response_in_its_own_template(model_path: Path) -> None:
    texts = [f"<system> be brief\n<user> ask\n<assistant> {answer}\n" for answer in ANSWERS]
    expected = [by_hand(model_path, text) for text in texts]
    assert len(set(expected)) == 3
    for batch_size in (2, 16):
        found = ask(model_path, *map(sample, ANSWERS), batch_size=batch_size)
        assert found == pytest.approx(expected, abs=1e-5)
    # A row without a chat has a prompt; what is over max_tokens is cut at the end; bias, scale and
    # clip count in this order.
    plain = by_hand(model_path, "<user> rendered prompt\n<assistant> yes\n")
    cut = by_hand(model_path, texts[0], max_tokens=8)
    raw = expected[0]
    for row, fields, reward in (
        ({}, {}, plain),
        ({"prompt": CHAT}, {"max_tokens": 8}, cut),
        ({"prompt": CHAT}, {"bias": raw - 0.5, "scale": 3.0, "clip": 9.0}, 1.5),
        ({"prompt": CHAT}, {"bias": raw + 0.5, "scale": 3.0, "clip": 1.0}, -1.0),
    ):
        (found,) = ask(model_path, sample("yes", row=row), **fields)
        assert found == pytest.approx(reward, abs=1e-4)


def test_a_model_that_cannot_score_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.terms\.mine\.path=.*: cannot be loaded"):
        ask(tmp_path)
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        ask(tmp_path)


@asynccontextmanager
async def scoring(term: RemoteTerm, *, limit_s: float = 10) -> AsyncIterator[RemoteScorer]:
    scorer = RemoteScorer(term, limit_s=limit_s)
    try:
        yield scorer
    finally:
        await scorer._http.aclose()


@asynccontextmanager
async def asking(
    answer: Callable[[int, Request], Response], **fields: Any
) -> AsyncIterator[tuple[RemoteScorer, list[Any]]]:
    """A scorer and what it asked of a server. answer: (number of the question, it) -> reply."""
    asked: list[Any] = []

    async def handle(request: Request) -> Response:
        asked.append(await request.json())
        return answer(len(asked), request)

    async with (
        serve(Starlette(routes=[Route("/", handle, methods=["POST"])])) as url,
        scoring(remote(f"{url}/", **fields)) as scorer,
    ):
        yield scorer, asked


async def test_a_plain_server_gets_the_sample_and_the_token_and_gives_a_number_or_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCORE_TOKEN", "mine")

    def answer(_: int, request: Request) -> Response:
        is_known = request.headers.get("authorization") == "Bearer mine"
        return JSONResponse({"score": 0.5, "tone": 2} if is_known else 0.25)

    async with asking(answer, token_env="SCORE_TOKEN") as (scorer, asked):
        assert await scorer(sample("yes")) == {"score": 0.5, "tone": 2}
    chat = asked[0]["row"]["prompt"]
    assert (asked[0]["response"], asked[0]["prompt_id"], chat) == ("yes", "p7", CHAT)
    async with asking(answer) as (scorer, _):
        assert await scorer(sample("yes")) == 0.25
    said = r"token_env=NOT_SET of http://127.0.0.1:1: there is no such environment variable"
    with pytest.raises(ConfigError, match=said):
        RemoteScorer(remote("http://127.0.0.1:1", token_env="NOT_SET"), limit_s=10)


async def test_a_server_that_fails_is_asked_again_up_to_its_attempts() -> None:
    busy = Response("busy", 503)
    async with asking(lambda n, _: JSONResponse(1.0) if n > 1 else busy) as (scorer, asked):
        assert await scorer(sample("yes")) == 1.0
        assert len(asked) == 2
    for reply, attempts, num_asked, said in (
        (busy, 1, 1, "gave no score in 1 attempts"),
        (Response("no such model", 404), 3, 1, r"refused the sample \(404\): no such model"),
        (Response("not json"), 2, 2, "DecodeError"),
    ):
        async with asking(lambda *_, r=reply: r, attempts=attempts) as (scorer, asked):
            with pytest.raises(RewardError, match=said):
                await scorer(sample("yes"))
        assert len(asked) == num_asked


async def test_a_server_that_does_not_answer_is_given_up_within_the_limit_of_one_call() -> None:
    # The kernel accepts the connection, and nobody reads it.
    with listen("127.0.0.1", 0) as listener:
        silent = remote(url_of(listener), attempts=2)
        async with asyncio.timeout(20), scoring(silent, limit_s=0.6) as scorer:
            with pytest.raises(RewardError, match="ReadTimeout"):
                await scorer(sample("yes"))


def test_another_verifier_judges_the_rows_tests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORE_TOKEN", TOKEN)
    echo = sample(
        "```sh\necho $((1 + 2)) | cat\n```",
        tests=[StdinTest(input="", output="3\n")], language="shell",
    )  # fmt: skip
    programs = ("def f(x):\n    return x", "def f(x):\n    return 1", "```python\nunfinished")

    async def run() -> list[Any]:
        given = remote(served.url, form="verifier", token_env="SCORE_TOKEN")
        scorer = RemoteVerifier(given, "auto", limit_s=10)
        scores = [await scorer(each) for each in (*map(sample, programs), echo)]
        await scorer.pool.close()
        return scores

    assert asyncio.run(run()) == [1.0, 0.5, 0.0, 1.0]
