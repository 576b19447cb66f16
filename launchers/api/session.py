"""Training and sampling by single calls: the client of a service (async_rl/service) in Python.

Invariant: a call that was accepted is executed once. It has a number, and is sent again if a
process of the service exits before it answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import msgspec
import numpy as np

from async_rl.core.errors import DataError, RunFailed
from async_rl.core.types import FloatArray
from async_rl.runs.control import living_pid
from async_rl.runs.samples import tokenizer_of
from async_rl.service.address import address_of
from async_rl.service.proto import Datum, Drawn, drawn_of, encode_batch, read_output
from async_rl.wire.addresses import LOOPBACK

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The service answers a call that waits for a result after 30 s, and a batch may take some seconds
# to arrive.
_TIMEOUT_S = 120.0
TRIES = 5
"""Connections before the life of the service is looked at: 7.5 s."""


class Session:
    """An adapter of a service: `with run.session() as session: session.sample(...)`. Each call
    returns when the service has executed it. The adapter leaves the service's memory after the
    block; the checkpoints of `save` stay.

    Attributes:
        run_id: The service's name of this training run.
    """

    def __init__(self, run_dir: Path, *, rank: int, checkpoint: str | None) -> None:
        address = address_of(run_dir)
        self._run_dir = run_dir
        self._http = httpx.Client(
            base_url=f"http://{LOOPBACK}:{address.port}/api/v1/",
            headers={"X-API-Key": address.api_key},
            timeout=_TIMEOUT_S,
            transport=httpx.HTTPTransport(retries=TRIES),
        )
        self._next = 0
        """The number of the next request; 0 makes the run."""
        self._samples = itertools.count()
        self._sampler = ""
        """Of the present weights; empty after a step."""
        self._session_id = self._call("create_session", {})["session_id"]
        new = {"session_id": self._session_id, "model_seq_id": 0}
        if checkpoint is not None:
            load = {**new, "path": checkpoint, "optimizer": True}
            made = self._result("load_weights", load)
        else:
            (model,) = self._call("get_server_capabilities")["supported_models"]
            form = {"base_model": model["model_name"], "lora_config": {"rank": rank}}
            made = self._result("create_model", {**new, **form})
        self.run_id = str(made["model_id"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session, as the end of its block does."""
        self._call(f"sessions/{self._session_id}/finish", {"reason": {"type": "success"}})
        self._http.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model: `encode(text).ids` and `decode(ids)`."""
        return tokenizer_of(self._run_dir)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, num_samples: int = 1, **params: Any
    ) -> list[list[Drawn]]:
        """Draw sequences with the present weights, and return those of each prompt.

        Args:
            prompts: Token ids.
            num_samples: Of each prompt.
            **params: max_tokens, temperature (1), top_k, top_p, seed, and stop: a text, texts or
                token ids; without it the model's end tokens stop.

        Raises:
            DataError: The service refuses a prompt or a parameter.
        """
        if not self._sampler:
            number = next(self._samples)
            made = self._numbered("save_weights_for_sampler", sampling_session_seq_id=number)
            self._sampler = made["sampling_session_id"]
        forms = [
            {
                "sampling_session_id": self._sampler,
                "seq_id": next(self._samples),
                "prompt": {"chunks": [{"tokens": np.asarray(prompt).tolist()}]},
                "sampling_params": params,
                "num_samples": num_samples,
            }
            for prompt in prompts
        ]
        # All are on their way before the first is waited for.
        ids = [self._call("asample", form)["request_id"] for form in forms]
        return [
            drawn_of(self._answer(sample), sample, np.array(prompt, np.int32), self.run_id)
            for sample, prompt in zip(ids, prompts, strict=True)
        ]

    def forward_backward(
        self, batch: Sequence[Datum], loss: str, **config: float
    ) -> tuple[list[FloatArray], dict[str, float]]:
        """Add the gradient of a batch to those since the newest step; docs/service.md has the
        losses and their configuration.

        Returns:
            The log-probs of each row's targets before the step, float32 [N], and the metrics.

        Raises:
            DataError: The service refuses the batch; nothing has changed.
        """
        body = encode_batch(batch, self.run_id, self._next, loss, config)
        return read_output(self._result("forward_backward", body))

    def step(self, lr: float, **adam: float) -> dict[str, float]:
        """Step with the gradients, clear them, and return the metrics of the step.

        Args:
            lr: The learning rate.
            **adam: beta1 (0.9), beta2 (0.95), eps (1e-12), weight_decay (0) and grad_clip_norm (0,
                which is no limit) of this step.
        """
        self._sampler = ""
        done = self._numbered("optim_step", adam_params={"learning_rate": lr, **adam})
        return dict(done["metrics"])

    def save(self, name: str) -> str:
        """Save weights and optimizer, and return the path for `Run.session(checkpoint=...)`."""
        return str(self._numbered("save_weights", path=name)["path"])

    def _numbered(self, kind: str, **form: object) -> Any:
        return self._result(kind, {"model_id": self.run_id, "seq_id": self._next, **form})

    def _result(self, kind: str, body: bytes | Mapping[str, object]) -> Any:
        request_id = self._call(kind, body)["request_id"]
        self._next += 1
        try:
            return self._answer(request_id)
        except RunFailed:
            # The same call, repeated, has the same number, so it is not executed twice.
            self._next -= 1
            raise

    def _answer(self, request_id: str) -> Any:
        while True:
            found = self._call("retrieve_future", {"request_id": request_id})
            if isinstance(found, bytes) or found.get("type") != "try_again":
                return found

    def _call(self, path: str, body: bytes | Mapping[str, object] | None = None) -> Any:
        """Return the answer: JSON, or the bytes of another type. Raises DataError, RunFailed."""
        content = msgspec.json.encode(body) if isinstance(body, Mapping) else body
        method = "GET" if content is None else "POST"
        while True:
            try:
                response = self._http.request(method, path, content=content)
                break
            except httpx.TransportError as error:
                if living_pid(self._run_dir) is None:
                    name = self._run_dir.name
                    raise RunFailed(
                        f"the service {name} is not running ({error}); async-rl resume {name}"
                        " continues it, and this call can be repeated"
                    ) from error
        if response.headers["content-type"] != "application/json":
            return response.content
        answer = response.json()
        if response.is_error or "error" in answer:
            raise DataError(answer["detail"] if response.is_error else answer["error"])
        return answer
