"""The term `reward_model`: scores of a Hugging Face sequence classifier, which reads prompt and
response in its own chat template.

Takes one sample per call, waits for the batch before, and returns one score per sample; samples
that arrive together share a batch. Invariants: the response is decoded text without special tokens,
appended as the assistant's turn, without a generation prompt; text over max_tokens is cut at the
end; a score does not depend on the other samples of its batch. The only file of rewards/ that needs
torch.
"""

import asyncio
from typing import Any

import torch

from async_rl.config.rewards import RewardModelTerm
from async_rl.core.errors import ConfigError
from async_rl.rewards.verifier.protocol import RewardSample


class RewardModel:
    """An asynchronous reward function. Raises ConfigError if the model cannot be used."""

    def __init__(self, config: RewardModelTerm, setting: str) -> None:
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
