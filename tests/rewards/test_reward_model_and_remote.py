"""The ready terms with a scorer outside: a reward model with its chat template, and an HTTP server
in two forms.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import compose
from rewards_support import calls, sample_of
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
from verifier_support import TOKEN, Served, serve, verifier_process

from async_rl.config.base import replace
from async_rl.config.rewards import RemoteTerm, RewardModelTerm
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.types import StdinTest
from async_rl.rewards.functions import RemoteScorer, RemoteVerifier
from async_rl.rewards.models import RewardModel
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.wire.http import url_of
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
    for batch_size in (2, 16):
        config = settings(model_path, batch_size=batch_size)
        found = ask(config, [sample(answer) for answer in ANSWERS])
        assert found == pytest.approx(expected, abs=1e-5)
    # A row without a chat has a prompt; what is over max_tokens is cut at the end.
    plain = by_hand(model_path, "<user> rendered prompt\n<assistant> yes\n")
    assert ask(settings(model_path), [sample("yes", row={})]) == [pytest.approx(plain, abs=1e-5)]
    cut = by_hand(model_path, texts[0], max_tokens=8)
    assert ask(settings(model_path, max_tokens=8), [sample("yes")]) == [
        pytest.approx(cut, abs=1e-5)
    ]
    # Bias, scale and clip, in this order.
    raw = expected[0]
    for bias, clip, reward in ((raw - 0.5, 9.0, 1.5), (raw + 0.5, 1.0, -1.0)):
        given = settings(model_path, bias=bias, scale=3.0, clip=clip)
        assert ask(given, [sample("yes")]) == [pytest.approx(reward, abs=1e-4)]


def test_a_model_that_cannot_score_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.terms\.mine\.path=.*: cannot be loaded"):
        RewardModel(settings(tmp_path), "reward.terms.mine")
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        RewardModel(settings(tmp_path), "reward.terms.mine")


def test_a_verifier_loads_the_model_where_the_configuration_asks_for_it(model_path: Path) -> None:
    config = compose("grpo_code", ["verifiers.cells=1", "sandbox.packages=[]"])
    terms = {"reward_model": settings(model_path)}
    config = replace(config, reward=replace(config.reward, terms=terms))

    async def run() -> float:
        async with asyncio.timeout(120), verifier_process(config) as client:
            scores = await client.ask_functions(["reward_model"], sample("yes"))
            return scores["reward_model"]["score"]

    text = "<system> be brief\n<user> ask\n<assistant> yes\n"
    assert asyncio.run(run()) == pytest.approx(by_hand(model_path, text), abs=1e-5)


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
    answer: Callable[[int, dict[str, Any], Request], Response], *terms: dict[str, Any]
) -> list[Any]:
    """(what a scorer of each term says, or its error; how often the server was asked).

    answer: (number of the question, its body, it) -> reply.
    """
    num_asked = 0

    async def handle(request: Request) -> Response:
        nonlocal num_asked
        num_asked += 1
        return answer(num_asked, await request.json(), request)

    async def run() -> list[Any]:
        nonlocal num_asked
        said = []
        async with serve(Starlette(routes=[Route("/", handle, methods=["POST"])])) as url:
            for fields in terms:
                num_asked = 0
                async with scoring(remote(f"{url}/", **fields)) as scorer:
                    try:
                        said.append((await scorer(sample("yes")), num_asked))
                    except RewardError as error:
                        said.append((str(error), num_asked))
        return said

    return asyncio.run(run())


def test_a_plain_server_gets_the_sample_and_the_token_and_gives_a_number_or_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCORE_TOKEN", "mine")

    def answer(_: int, body: dict[str, Any], request: Request) -> Response:
        chat = body["row"]["prompt"]
        assert (body["response"], body["prompt_id"], chat[1]["content"]) == ("yes", "p7", "ask")
        if "authorization" not in request.headers:
            return JSONResponse(0.25)
        assert request.headers["authorization"] == "Bearer mine"
        return JSONResponse({"score": 0.5, "tone": 2})

    found = from_server(answer, {"token_env": "SCORE_TOKEN"}, {})
    assert found == [({"score": 0.5, "tone": 2}, 1), (0.25, 1)]
    said = r"token_env=NOT_SET of http://127.0.0.1:1: there is no such environment variable"
    with pytest.raises(ConfigError, match=said):
        RemoteScorer(remote("http://127.0.0.1:1", token_env="NOT_SET"), limit_s=10)


def test_a_server_that_fails_is_asked_again_up_to_its_attempts() -> None:
    def second_time(number: int, _: dict[str, Any], __: Request) -> Response:
        return JSONResponse(1.0) if number > 1 else Response("busy", 503)

    again, once = from_server(second_time, {"attempts": 2}, {"attempts": 1})
    assert again == (1.0, 2)
    assert (once[1], "gave no score in 1 attempts" in once[0]) == (1, True)
    ((said, asked),) = from_server(lambda *_: Response("no such model", 404), {"attempts": 3})
    assert (asked, "refused the sample (404): no such model" in said) == (1, True)
    ((said, asked),) = from_server(lambda *_: Response("not json"), {"attempts": 2})
    assert (asked, "DecodeError" in said) == (2, True)


async def test_a_server_that_does_not_answer_is_given_up_within_the_limit_of_one_call() -> None:
    # The kernel accepts the connection, and nobody reads it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        term = remote(url_of(listener), attempts=2)
        async with asyncio.timeout(20), scoring(term, limit_s=0.6) as scorer:
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
        term = remote(served.url, form="verifier", token_env="SCORE_TOKEN")
        scorer = RemoteVerifier(term, "auto", limit_s=10)
        scores = [await scorer(each) for each in (*map(sample, programs), echo)]
        await scorer.pool.close()
        return scores

    assert asyncio.run(run()) == [1.0, 0.5, 0.0, 1.0]
