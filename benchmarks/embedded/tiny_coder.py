"""The embedded model: a small Qwen3 that has read a flawed corpus, saved as a Hugging Face
directory.

Invariants
- Held-out specs are not in the corpus; prompts carry no loss; padding is never attended to by a
  token that carries loss.
- Same settings on the same machine give the same weights; no global random state is read or left
  changed.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.core.frozen import frozen
from benchmarks.embedded import corpus, list_functions
from benchmarks.embedded.vocabulary import build_tokenizer

_IGNORED = -100  # the label that torch's cross-entropy leaves out by default
_WARMUP_STEPS = 20
_BUCKET_BATCHES = 8
_NUM_WORKERS = 2  # a constant: another number would sum gradients in another order

MAX_LENGTH = 512
"""Tokens of a sequence of the embedded model at most."""


@frozen
class TinyCoder:
    """A small Qwen3 that is trained briefly (warm start).

    flaw_probability: how often the corpus contains a wrong program for a concept, which leaves
    something to learn (docs/decisions/flawed_warm_start.md).  flaw_spread: the concepts are wrong
    at flaw_probability * (1 -+ flaw_spread), evenly spaced.  retry_share: share of the corpus
    where a first program failed and the prompt requests another (two turns).  seed: of both.
    """

    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 6
    warm_start_steps: int = 240
    warm_start_batch: int = 64
    warm_start_lr: float = 5e-3
    # Without flaws the model starts near 100 % and nothing is left to learn.
    flaw_probability: float = 0.4
    # Some concepts are nearly right and some mostly wrong, so that there are prompts of all levels.
    flaw_spread: float = 0.5
    retry_share: float = 0.0
    seed: int = 0


TINY_CODER = TinyCoder()
TINY_CODER_WITH_RETRIES = TinyCoder(retry_share=0.5)
"""Half of its corpus shows how a failed program is corrected."""

Progress = Callable[[float, str], None]
Batch = tuple[Tensor, Tensor]


def build_model(config: TinyCoder, tokenizer: Any) -> Any:
    """A Qwen3ForCausalLM with fresh float32 weights drawn from `config.seed`; input and output
    embeddings are tied.
    """
    qwen = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    # The process may be seeded for something else; the weights depend on config.seed only.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Qwen3ForCausalLM(qwen)


def batches(pairs: Iterator[tuple[str, str]], tokenizer: Any, batch_size: int) -> Iterator[Batch]:
    """Endless supervised batches: token ids int64 [B, L] and labels int64 [B, L], -100 on prompts
    and padding.

    Sequences of about the same length share a batch: drawn _BUCKET_BATCHES at a time and sorted.
    The order of those batches is then spread by a fixed stride, so that lengths do not rise in a
    saw tooth.
    """
    pad = tokenizer.pad_token_id
    end = tokenizer.eos_token_id
    while True:
        drawn = list(itertools.islice(pairs, batch_size * _BUCKET_BATCHES))
        prompts = tokenizer([prompt for prompt, _ in drawn])["input_ids"]
        answers = tokenizer([answer for _, answer in drawn])["input_ids"]
        # Sorted by length, a batch has little padding, which would cost as much as tokens.
        rows = sorted(
            ((p, [*a, end]) for p, a in zip(prompts, answers, strict=True)),
            key=lambda row: len(row[0]) + len(row[1]),
        )
        for bucket in range(_BUCKET_BATCHES):
            # 3 and 8 have no common factor, so every bucket is used once.
            start = (bucket * 3 % _BUCKET_BATCHES) * batch_size
            chosen = rows[start : start + batch_size]
            ids = [torch.tensor(p + a) for p, a in chosen]
            labels = [torch.tensor([_IGNORED] * len(p) + a) for p, a in chosen]
            yield (
                pad_sequence(ids, batch_first=True, padding_value=pad),
                pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
            )


def supervised_loss(model: Any, batch: Batch) -> Tensor:
    """Summed cross-entropy (float32 scalar) of the labelled tokens; logits are computed at their
    positions only.
    """
    ids, labels = batch
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    # Prompts are most of the tokens, and the head is most of a small model's work.
    has_loss = labels[:, 1:] != _IGNORED
    logits = model.lm_head(hidden[:, :-1][has_loss])
    return F.cross_entropy(logits, labels[:, 1:][has_loss], reduction="sum")


def accumulate_gradients(model: nn.Module, batch: Batch, pool: Executor) -> float:
    """Set the gradients of the mean loss over the labelled tokens of `batch`; returns that loss.

    Each worker of the pool takes a share of the rows on one core.  Against threads inside each
    operation this waits once per step instead of hundreds of times, which matters on a busy
    machine, and the result does not depend on the number of cores.
    """
    parameters = list(model.parameters())
    num_tokens = int((batch[1][:, 1:] != _IGNORED).sum())

    def share(rows: slice) -> tuple[float, tuple[Tensor, ...]]:
        loss = supervised_loss(model, (batch[0][rows], batch[1][rows])) / num_tokens
        return float(loss.detach()), torch.autograd.grad(loss, parameters)

    parts = [slice(part, None, _NUM_WORKERS) for part in range(_NUM_WORKERS)]
    shares = list(pool.map(share, parts))
    for index, parameter in enumerate(parameters):
        # In the order of the shares, whichever was ready first: the sum must not vary.
        parameter.grad = torch.stack([gradients[index] for _, gradients in shares]).sum(0)
    return sum(loss for loss, _ in shares)


def learning_rate(step: int, *, num_steps: int, peak: float) -> float:
    """Linear warm-up from peak / _WARMUP_STEPS, then linear decay to a fiftieth of the peak."""
    if step < _WARMUP_STEPS:
        return peak * (step + 1) / _WARMUP_STEPS
    left = (num_steps - step) / max(num_steps - _WARMUP_STEPS, 1)
    return peak * max(left, 0.02)


def build_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, and AdamW for embeddings and norms.

    Against AdamW alone, Muon (arXiv 2502.16982, its scaling) needs about half the steps and leaves
    a third of the malformed programs.
    """
    # Muon is for matrices that multiply activations; embeddings are tables.
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


def warm_start(
    model: nn.Module, data: Iterator[Batch], config: TinyCoder, on_progress: Progress
) -> list[float]:
    """Supervised steps on `data`; returns the loss of each step."""
    optimizers = build_optimizers(model, config.warm_start_lr)
    losses: list[float] = []
    model.train()
    with (
        _one_thread_per_operation(),
        ThreadPoolExecutor(_NUM_WORKERS, "warm-start", torch.set_num_threads, (1,)) as pool,
    ):
        for step in range(config.warm_start_steps):
            lr = learning_rate(step, num_steps=config.warm_start_steps, peak=config.warm_start_lr)
            losses.append(accumulate_gradients(model, next(data), pool))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
            # The optimizers have disjoint parameters, so their steps may run at the same time.
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
            text = f"warm start: step {step + 1}/{config.warm_start_steps}, loss {losses[-1]:.3f}"
            on_progress((step + 1) / config.warm_start_steps, text)
    model.eval()
    return losses


@contextlib.contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Helper threads of single operations would take the cores from the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_tiny_coder(directory: Path, config: TinyCoder, on_progress: Progress) -> None:
    """Build tokenizer and model, warm-start it on the training specs and save everything into
    `directory`.
    """
    on_progress(0.0, "building the tokenizer")
    tokenizer = build_tokenizer(corpus.vocabulary_text(), MAX_LENGTH)
    model = build_model(config, tokenizer)
    specs, _ = list_functions.split()
    rates = corpus.flaw_rates(config.flaw_probability, config.flaw_spread)
    data = batches(
        corpus.corpus(specs, rates, config.seed, config.retry_share),
        tokenizer,
        config.warm_start_batch,
    )
    warm_start(model, data, config, on_progress)
    tokenizer.save_pretrained(str(directory))
    # Its bar would overwrite the progress of the run.
    disable_progress_bar()
    model.save_pretrained(str(directory))
