"""Reward functions of the configuration: how they are found, how their results are read, and the
ready ones, one that runs a model and two that call a server.

A function takes one RewardSample, plain or async. It returns a number, or named parts: a dict of
numbers whose "score", or else sum, is its score. Any other value, and nan or infinity, is a
RewardError.
"""

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from async_rl.config.plugins import REWARD, load_function
from async_rl.config.rewards import (
    Extraction,
    PluginTerm,
    RemoteTerm,
    RewardConfig,
    RewardModelTerm,
)
from async_rl.core.errors import ConfigError, DataError, RewardError
from async_rl.core.types import CodeProblem, Verdict
from async_rl.rewards.responses import extract_code, is_well_formed
from async_rl.rewards.verifier.pool import VerifierPool
from async_rl.rewards.verifier.protocol import SCORE, Parts, RewardSample, VerifyRequest

RewardFunction = Callable[[RewardSample], Any]
"""Returns an argument of `read_score`, or an awaitable of it."""
# A server that restarts or is full needs a moment; the limit of the call bounds all attempts.
_PAUSE_S = 0.1


def find_function(name: str, reward: RewardConfig, *, limit_s: float) -> RewardFunction:
    """The function; loads its model if it has one. Raises ConfigError.

    limit_s: the longest call, for a function that retries within it.
    """
    match reward.terms[name]:
        case RewardModelTerm() as term:
            return RewardModel(term, f"reward.terms.{name}")
        case RemoteTerm(form="verifier") as term:
            return RemoteVerifier(term, reward.extraction, limit_s=limit_s)
        case RemoteTerm() as term:
            return RemoteScorer(term, limit_s=limit_s)
        case PluginTerm(fn=function):
            return load_function(f"reward.terms.{name}.fn", function, REWARD)
        case term:
            return {"xml_format": xml_format, "length": length}[term.kind]


def check_functions(reward: RewardConfig) -> list[str]:
    """One line per function that cannot be loaded; imports the modules but loads no model."""
    problems = []
    for name, term in reward.terms.items():
        if isinstance(term, PluginTerm):
            try:
                load_function(f"reward.terms.{name}.fn", term.fn, REWARD)
            except ConfigError as error:
                problems.append(str(error))
    return problems


def read_score(name: str, returned: Any) -> Parts:
    """The parts of a score, "score" among them. Raises RewardError."""
    parts = returned if isinstance(returned, dict) else {SCORE: returned}
    try:
        are_numbers = bool(parts) and all(
            isinstance(part, str) and math.isfinite(value) for part, value in parts.items()
        )
    except (TypeError, ValueError, OverflowError):
        are_numbers = False
    if not are_numbers:
        raise RewardError(
            f"{name} returned {returned!r:.200}; return a finite number, or a dict of names and"
            " finite numbers, and define a function that awaits with async def"
        )
    # Also numbers of numpy and torch, which JSON cannot encode.
    numbers = {part: float(value) for part, value in parts.items()}
    return {SCORE: sum(numbers.values()), **numbers}


def xml_format(sample: RewardSample) -> float:
    """1 for <think>..</think><answer>..</answer>, else 0."""
    return float(is_well_formed(sample.response))


def length(sample: RewardSample) -> float:
    """The share of the allowed tokens that the policy used. A negative weight makes responses
    shorter, a positive weight longer.
    """
    return min(sum(sample.is_written) / sample.max_tokens, 1.0)


def _token_of(remote: RemoteTerm) -> str:
    """The token to send, empty for none. Raises ConfigError if it is missing."""
    token = os.environ.get(remote.token_env or "", "")
    # At the start: a server without the token would refuse the first sample of a run.
    if remote.token_env and not token:
        raise ConfigError(
            f"token_env={remote.token_env} of {remote.url}: there is no such environment variable;"
            " set it to the token"
        )
    return token


class RemoteScorer:
    """The term `remote` in the form plain: the score of an HTTP server.

    POST url with the RewardSample as JSON; the answer is a number, or an object of named numbers,
    which is read like the result of a function. Invariants: all attempts together end within
    `limit_s`; a refusal (4xx except 429) is not retried; a call without an answer raises and is not
    scored. Raises ConfigError if the token is missing.
    """

    def __init__(self, remote: RemoteTerm, *, limit_s: float) -> None:
        self._remote = remote
        headers = {"content-type": "application/json"}
        token = _token_of(remote)
        if token:
            headers["authorization"] = f"Bearer {token}"
        # Without the proxy of the environment: samples must reach the configured server only.
        self._http = httpx.AsyncClient(
            timeout=limit_s / remote.attempts, trust_env=False, headers=headers
        )

    async def __call__(self, sample: RewardSample) -> Any:
        """The server's score. Raises RewardError after `attempts` failures."""
        url = self._remote.url
        problem = ""
        for attempt in range(self._remote.attempts):
            # No pause before the first attempt, and a longer one before each further attempt.
            await asyncio.sleep(_PAUSE_S * attempt)
            try:
                reply = await self._http.post(url, content=msgspec.json.encode(sample))
                # The same sample would be refused again; a full server (429) may take it later.
                if 400 <= reply.status_code < 500 and reply.status_code != 429:
                    said = reply.text[:200]
                    raise RewardError(f"{url} refused the sample ({reply.status_code}): {said}")
                reply.raise_for_status()
                return msgspec.json.decode(reply.content)
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                problem = f"{type(error).__name__} {error}"
        raise RewardError(
            f"{url} gave no score in {self._remote.attempts} attempts; the last: {problem}"
        )


class RemoteVerifier:
    """The term `remote` in the form verifier: the share of the row's tests that pass, judged by
    another async-rl verifier. Raises ConfigError if the token is missing.
    """

    def __init__(self, remote: RemoteTerm, extraction: Extraction, *, limit_s: float) -> None:
        self._extraction = extraction
        # The last answer must arrive before the call itself is too late.
        limit_s *= 0.9
        self.pool = VerifierPool(_token_of(remote), [remote.url.rstrip("/")], limit_s=limit_s)

    async def __call__(self, sample: RewardSample) -> float:
        """The share. Raises as `share_of_tests`."""
        problem = CodeProblem(tests=sample.tests, setup=sample.setup, language=sample.language)
        return await share_of_tests(self.pool, problem, sample.response, self._extraction)


class RewardModel:
    """The term `reward_model`: the score of a Hugging Face sequence classifier, which reads prompt
    and response in its own chat template.

    Takes one sample per call, waits for the batch before, and returns one score per sample; samples
    that arrive together share a batch. Invariants: the response is decoded text without special
    tokens, appended as the assistant's turn, without a generation prompt; text over max_tokens is
    cut at the end; a score does not depend on the other samples of its batch. Raises ConfigError if
    the model cannot be used.
    """

    def __init__(self, config: RewardModelTerm, setting: str) -> None:
        # It takes seconds to import, and most runs have no reward model.
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._config = config
        path = f"{setting}.path={config.path}"
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(config.path)
            model: Any = AutoModelForSequenceClassification.from_pretrained(config.path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"{path}: cannot be loaded ({reason}); name a sequence classifier"
            ) from error
        if model.config.num_labels != 1:
            raise ConfigError(
                f"{path}: has {model.config.num_labels} outputs; a reward model has one"
            )
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{path}: its tokenizer has no chat template; add one that suits the model"
            )
        # Models that were made to write text often have none.
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The classifier reads the last token before the padding.
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        model.config.pad_token_id = tokenizer.pad_token_id
        self._tokenizer = tokenizer
        self._model: Any = model.to(config.device).eval()
        self._waiting: list[tuple[str, asyncio.Future[float]]] = []
        self._working = asyncio.Lock()

    async def __call__(self, sample: RewardSample) -> float:
        """clip((score - bias) scale, -clip, clip)."""
        config = self._config
        future = asyncio.Future[float]()
        self._waiting.append((self.text(sample), future))
        await asyncio.sleep(0)  # the calls of one read arrive in one turn of the event loop
        async with self._working:
            while not future.done():
                await self._score_batch()
        return max(-config.clip, min(config.clip, (future.result() - config.bias) * config.scale))

    def text(self, sample: RewardSample) -> str:
        """Prompt and response in the model's own template."""
        prompt = sample.row.get("prompt") or sample.row.get("question") or sample.prompt
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": str(prompt)}]
        messages = [*prompt, {"role": "assistant", "content": sample.response}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))

    async def _score_batch(self) -> None:
        batch = self._waiting[: self._config.batch_size]
        try:
            # In a thread, so that further calls arrive while the model computes.
            scores = await asyncio.to_thread(self._scores, [text for text, _ in batch])
        except RuntimeError as error:
            # One copy for each call: a traceback grows with every task that raises its exception.
            for _, future in batch:
                future.set_exception(RuntimeError(str(error)))
        else:
            for (_, future), score in zip(batch, scores, strict=True):
                future.set_result(score)
        # Only now: if this call is cancelled, another one scores the batch again.
        del self._waiting[: len(batch)]

    def _scores(self, texts: list[str]) -> list[float]:
        import torch

        rows = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self._config.max_tokens,
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self._config.device)
        with torch.inference_mode():
            logits = self._model(
                input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]
            ).logits
        return [float(score) for score in logits[:, 0].float()]


async def share_of_tests(
    verifiers: VerifierPool, problem: CodeProblem, response: str, extraction: Extraction
) -> float:
    """The share of the tests of a problem that a response passes; 0 without a program.

    Raises DataError if a test is broken, else as `VerifierPool.answer`.
    """
    code: str | None = response
    # An answer in words is compared with the whole response.
    if not problem.wants_words:
        code = extract_code(response, extraction, problem.language)
    if code is None:
        return 0.0
    request = VerifyRequest(
        code=code,
        tests=problem.tests,
        language=problem.language,
        setup=problem.setup,
        stop_at_first_failure=False,
    )
    results = (await verifiers.answer(request)).tests
    for test in results:
        if test.verdict is Verdict.TEST_ERROR:
            raise DataError(f"a test is broken: {test.message}")
    return sum(test.verdict is Verdict.PASS for test in results) / len(problem.tests)
