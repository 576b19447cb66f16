"""The term `reward_model`: scores of a Hugging Face sequence classifier, which reads prompt and
response in its own chat template.

takes: samples, one call each; waits for: the pass before; gives: one score per sample, those that
came together from one pass Invariants: the response is decoded text without special tokens,
appended as the assistant's turn; no generation prompt; what is over max_tokens is cut at the end; a
score does not depend on what else is in its batch. Runs in reward_child.py; the only file of
rewards/ that needs torch.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from async_rl.config.rewards import RewardModelConfig
from async_rl.core.errors import ConfigError
from async_rl.rewards.verifier.protocol import RewardSample


class RewardModel:
    """An asynchronous reward function. Raises ConfigError where the model cannot be loaded or used."""

    def __init__(self, config: RewardModelConfig) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._config = config
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.path)
            model: Any = AutoModelForSequenceClassification.from_pretrained(config.path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"reward.model.path={config.path}: cannot be loaded ({reason}); name a sequence"
                " classifier"
            ) from error
        if model.config.num_labels != 1:
            raise ConfigError(
                f"reward.model.path={config.path}: has {model.config.num_labels} outputs; a reward"
                " model has one"
            )
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"reward.model.path={config.path}: its tokenizer has no chat template; add one that"
                " suits the model"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._tokenizer.padding_side = self._tokenizer.truncation_side = "right"
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model: Any = model.to(config.device).eval()
        self._waiting: list[tuple[str, asyncio.Future[float]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, sample: RewardSample) -> float:
        """clip((score - bias) scale, -clip, clip)."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((self.text(sample), future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="reward model")
        config = self._config
        return max(-config.clip, min(config.clip, (await future - config.bias) * config.scale))

    def text(self, sample: RewardSample) -> str:
        """Prompt and response in the model's own template."""
        asked = sample.row.get("prompt") or sample.row.get("question") or sample.prompt
        messages = [
            *(asked if isinstance(asked, list) else [{"role": "user", "content": str(asked)}])
        ]
        messages.append({"role": "assistant", "content": sample.response})
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=False
            )
        )

    async def _work(self) -> None:
        await asyncio.sleep(0)  # the calls of one read arrive in one turn of the loop
        while self._waiting:
            batch, self._waiting = (
                self._waiting[: self._config.batch_size],
                self._waiting[self._config.batch_size :],
            )
            try:
                scores = await asyncio.to_thread(self._scores, [text for text, _ in batch])
            except RuntimeError as error:
                for _, future in batch:
                    future.set_exception(RuntimeError(str(error)))
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    def _scores(self, texts: list[str]) -> list[float]:
        rows = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self._config.max_tokens,
            add_special_tokens=False,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits = self._model(
                **{
                    name: rows[name].to(self._config.device)
                    for name in ("input_ids", "attention_mask")
                }
            ).logits
        return [float(score) for score in logits[:, 0].float()]
