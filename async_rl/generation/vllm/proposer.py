"""Drafts from earlier responses to the prompt: vLLM's lookup of n-grams in more than the row.

vLLM's lookup finds the tokens that followed the last ones earlier in the row. Here it also finds
those of earlier responses, which come with the request. `benchmarks/generation/draft_rate.py`
measures it.

Written against vLLM 0.32. The import compiles functions, so only an engine with drafts imports it.
"""

from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.spec_decode.ngram_proposer import (
    NgramProposer,
    _find_longest_matched_ngram_and_propose_tokens,
)

from async_rl.core.types import IntArray
from async_rl.generation.vllm.sampling import EARLIER


class Proposer(NgramProposer):
    """vLLM's lookup, as if the earlier responses were written before the row.

    The longest match counts, and of equal ones the first, so an earlier response goes before the
    row. runner: vLLM's model runner, whose requests have the responses (`EARLIER`).
    """

    def __init__(self, vllm_config: VllmConfig, runner: Any) -> None:
        super().__init__(vllm_config)
        self._runner = runner

    def batch_propose(
        self,
        num_requests: int,
        valid_ngram_requests: list[int],
        num_tokens_no_spec: IntArray,
        token_ids_cpu: IntArray,
        k: int,
    ) -> list[list[int]]:
        """Return at most k tokens for each row; none for a row that is not in the second list."""
        proposed: list[list[int]] = [[] for _ in range(num_requests)]
        for row in valid_ngram_requests:
            request = self._runner.requests[self._runner.input_batch.req_ids[row]]
            extra = request.sampling_params.extra_args or {}
            earlier = np.frombuffer(extra.get(EARLIER, b""), np.int32)
            written = token_ids_cpu[row, : num_tokens_no_spec[row]]
            found = _find_longest_matched_ngram_and_propose_tokens(
                np.concatenate([earlier, written]),
                self.min_n,
                self.max_n,
                self.max_model_len + len(earlier),
                k,
            )
            proposed[row] = found.tolist()
        return proposed
