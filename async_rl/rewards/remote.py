"""The term `remote`: the score of an HTTP server, in one of two forms.

plain: POST url with the RewardSample as JSON; the answer is a number, or an object of named
numbers, which is read like the result of a function.
verifier: POST url/verify of another async-rl verifier with the program and the row's tests; the
score is the share of passed tests.
Invariants: all attempts together end within `limit_s`; a refusal (4xx except 429) is not
retried; a call without an answer raises and is not scored.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import msgspec

from async_rl.config.rewards import Extraction, RemoteTerm
from async_rl.core.errors import ConfigError, RewardError
from async_rl.core.types import Verdict
from async_rl.rewards.extractor import Extractor
from async_rl.rewards.verifier.protocol import RewardSample, VerifyRequest, VerifyResponse

_PAUSE_S = 0.1


class RemoteScorer:
    """An asynchronous reward function. Raises ConfigError if its URL or its token is missing."""

    def __init__(self, remote: RemoteTerm, *, extraction: Extraction, limit_s: float) -> None:
        token = os.environ.get(remote.token_env or "", "")
        if remote.token_env and not token:
            raise ConfigError(
                f"token_env={remote.token_env} of {remote.url}: there is no such environment"
                " variable; set it to the token"
            )
        self._remote, self._extraction, self._url = remote, extraction, remote.url.rstrip("/")
        self._extractor = Extractor()
        headers = {"content-type": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._http = httpx.AsyncClient(
            headers=headers, timeout=limit_s / remote.attempts, trust_env=False
        )

    async def __call__(self, sample: RewardSample) -> Any:
        """The server's score. Raises RewardError after `attempts` failures."""
        score = self._plain if self._remote.form == "plain" else self._share_of_tests
        problem = ""
        for attempt in range(self._remote.attempts):
            await asyncio.sleep(_PAUSE_S * attempt)
            try:
                return await score(sample)
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                problem = f"{type(error).__name__} {error}"
        raise RewardError(
            f"{self._url} gave no score in {self._remote.attempts} attempts; the last: {problem}"
        )

    async def _plain(self, sample: RewardSample) -> Any:
        return msgspec.json.decode(await self._post(self._url, sample))

    async def _share_of_tests(self, sample: RewardSample) -> dict[str, float]:
        code = await self._extractor.code(sample.response, self._extraction)
        if code is None:
            return {"score": 0.0}
        request = VerifyRequest(
            code=code, tests=sample.tests, setup=sample.setup, stop_at_first_failure=False
        )
        body = await self._post(f"{self._url}/verify", request)
        answer = msgspec.json.decode(body, type=VerifyResponse)
        if answer.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise httpx.RemoteProtocolError(
                f"it could not judge the program: {answer.tests[0].message}"
            )
        if answer.verdict is Verdict.TEST_ERROR:
            raise RewardError(f"a test of the sample is broken: {answer.tests[-1].message}")
        num_passed = sum(test.verdict is Verdict.PASS for test in answer.tests)
        return {"score": num_passed / max(len(answer.tests), len(sample.tests))}

    async def _post(self, url: str, message: msgspec.Struct) -> bytes:
        reply = await self._http.post(url, content=msgspec.json.encode(message))
        if 400 <= reply.status_code < 500 and reply.status_code != 429:
            raise RewardError(f"{url} refused the sample ({reply.status_code}): {reply.text[:200]}")
        reply.raise_for_status()
        return reply.content
