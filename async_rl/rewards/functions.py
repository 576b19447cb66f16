"""Reward functions of the configuration: how they are found, how their results are read, and the
ready functions that need no model.

A function takes one RewardSample, plain or async. It returns a number, or named parts: a dict of
numbers whose "score", or else sum, is its score. Any other value, and nan or infinity, is a
RewardError.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
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
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.types import Verdict
from async_rl.rewards.responses import is_well_formed
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.protocol import SCORE, RewardSample, VerifyRequest, VerifyResponse

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
            # torch and transformers take seconds to import, and most runs have no reward model.
            from async_rl.rewards.models import RewardModel

            return RewardModel(term, f"reward.terms.{name}")
        case RemoteTerm() as term:
            return RemoteScorer(term, extraction=reward.extraction, limit_s=limit_s)
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


def read_score(name: str, returned: Any) -> dict[str, float]:
    """The parts of a score, "score" among them. Raises RewardError."""
    # The call was not awaited, because only a function defined with async def is.
    if isinstance(returned, Awaitable):
        raise RewardError(f"{name} returned an awaitable; define it with async def")
    parts = returned if isinstance(returned, dict) else {SCORE: returned}
    numbers = {}
    for part, value in parts.items():
        try:
            is_number = isinstance(part, str) and math.isfinite(value)
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            raise RewardError(
                f"{name} returned {returned!r:.200}; return a finite number, or a dict of names and"
                " finite numbers"
            )
        # Also numbers of numpy and torch, which JSON cannot encode.
        numbers[part] = float(value)
    if not numbers:
        raise RewardError(f"{name} returned an empty dict; return at least one part")
    return {SCORE: sum(numbers.values()), **numbers}


def xml_format(sample: RewardSample) -> float:
    """1 for <think>..</think><answer>..</answer>, else 0."""
    return float(is_well_formed(sample.response))


def length(sample: RewardSample) -> float:
    """The share of the allowed tokens that the policy used. A negative weight makes responses
    shorter, a positive weight longer.
    """
    return min(sum(sample.is_written) / sample.max_tokens, 1.0)


class RemoteScorer:
    """The term `remote`: the score of an HTTP server, in one of two forms.

    plain: POST url with the RewardSample as JSON; the answer is a number, or an object of named
    numbers, which is read like the result of a function. verifier: POST url/verify of another
    async-rl verifier with the program and the row's tests; the score is the share of passed tests.
    Invariants: all attempts together end within `limit_s`; a refusal (4xx except 429) is not
    retried; a call without an answer raises and is not scored. Raises ConfigError if the token is
    missing.
    """

    def __init__(self, remote: RemoteTerm, *, extraction: Extraction, limit_s: float) -> None:
        token = os.environ.get(remote.token_env or "", "")
        # At the start: a server without the token would refuse the first sample of a run.
        if remote.token_env and not token:
            raise ConfigError(
                f"token_env={remote.token_env} of {remote.url}: there is no such environment"
                " variable; set it to the token"
            )
        self._remote = remote
        self._extraction = extraction
        self._url = remote.url.rstrip("/")
        self._text = TextProcess()
        # Without the proxy of the environment: samples must reach the configured server only.
        self._http = httpx.AsyncClient(timeout=limit_s / remote.attempts, trust_env=False)
        self._http.headers["content-type"] = "application/json"
        if token:
            self._http.headers["authorization"] = f"Bearer {token}"

    async def __call__(self, sample: RewardSample) -> Any:
        """The server's score. Raises RewardError after `attempts` failures."""
        problem = ""
        for attempt in range(self._remote.attempts):
            # No pause before the first attempt, and a longer one before each further attempt.
            await asyncio.sleep(_PAUSE_S * attempt)
            try:
                if self._remote.form == "verifier":
                    return await self._share_of_tests(sample)
                return msgspec.json.decode(await self._post(self._url, sample))
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                problem = f"{type(error).__name__} {error}"
        raise RewardError(
            f"{self._url} gave no score in {self._remote.attempts} attempts; the last: {problem}"
        )

    async def _share_of_tests(self, sample: RewardSample) -> float:
        language = sample.language
        code = await self._text.code(sample.response, self._extraction, language)
        if code is None:
            return 0.0
        request = VerifyRequest(
            code=code,
            tests=sample.tests,
            language=language,
            setup=sample.setup,
            stop_at_first_failure=False,
        )
        body = await self._post(f"{self._url}/verify", request)
        answer = msgspec.json.decode(body, type=VerifyResponse)
        if answer.verdict is Verdict.INFRASTRUCTURE_ERROR:
            # An error of httpx, so that the next attempt asks again.
            raise httpx.RemoteProtocolError(
                f"it could not judge the program: {answer.tests[0].message}"
            )
        if answer.verdict is Verdict.TEST_ERROR:
            raise RewardError(f"a test of the sample is broken: {answer.tests[-1].message}")
        return answer.share(len(sample.tests))

    async def _post(self, url: str, message: msgspec.Struct) -> bytes:
        reply = await self._http.post(url, content=msgspec.json.encode(message))
        # The same sample would be refused again; a full server (429) may take it later.
        if 400 <= reply.status_code < 500 and reply.status_code != 429:
            raise RewardError(f"{url} refused the sample ({reply.status_code}): {reply.text[:200]}")
        reply.raise_for_status()
        return reply.content
