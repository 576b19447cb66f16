"""The sizes and seeds of the embedded model.

They are constants rather than settings because no one trains another variant: a run that needs a
different model sets `model.path`.  Functions take the values as parameters, so tests build smaller
models.  Every value is part of the key of the cached model.
"""

from typing import Any

from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen

MAX_LENGTH = 512
"""Tokens of a sequence of the embedded model at most."""


@frozen
class TinyCoder:
    """A small Qwen3 that is built and trained briefly (warm start) on first use.

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

    @property
    def hf_config(self) -> dict[str, Any]:
        """The sizes of the model as in config.json; its tokenizer has at most vocab_size tokens."""
        return {
            "model_type": "qwen3",
            "vocab_size": 1024,
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "max_position_embeddings": MAX_LENGTH,
            "tie_word_embeddings": True,
        }


TINY_CODER = TinyCoder()
TINY_CODER_WITH_RETRIES = TinyCoder(retry_share=0.5)
"""For the next two: half of the corpus shows how a failed program is corrected."""
RETRYING_ROLLOUT = "async_rl.examples.run_and_retry:rollout"
"""The `rollout.fn` of conf/grpo_code_retry.yaml, whose second turn the plain model never saw."""
RETRYING_AGENT = "async_rl.examples.tool_agent:solve"
"""The agent of conf/agent_code.yaml, which lets the policy read the same texts."""


def tiny_coder_of(config: RunConfig) -> TinyCoder:
    """Return the embedded model that fits the run's rollout."""
    if config.rollout.fn == RETRYING_ROLLOUT or config.agent.fn == RETRYING_AGENT:
        return TINY_CODER_WITH_RETRIES
    return TINY_CODER
