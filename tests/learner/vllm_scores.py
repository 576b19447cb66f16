"""What stock vLLM says of token rows under a model directory: python vllm_scores.py MODEL ROWS_JSON
OUT.

A process of its own, as vLLM changes its process for good.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from async_rl.composition.compose import compose
from async_rl.generation.environment import prepare_environment


def main(model: str, rows: list[list[int]], out: Path) -> None:
    prepare_environment(compose("grpo_code", ["generation.vllm.enforce_eager=true"]), [])
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        compilation_config={"mode": 0},
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        disable_log_stats=True,
    )
    settings = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate(
        [TokensPrompt(prompt_token_ids=row) for row in rows], settings, use_tqdm=False
    )
    said = [
        [0.0]
        + [
            told[token].logprob
            for token, told in zip(row[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for row, output in zip(rows, found, strict=True)
    ]
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
