"""Convert a quantised GGUF file to the directory of a Hugging Face model in float32.

`python -m benchmarks.gguf_model FILE DIRECTORY`; `make real` calls it. Needs the packages gguf and
accelerate.
Invariant: the directory is complete or absent, and is not written again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.core.extras import missing
from async_rl.data.cache import build_once


def convert(file: Path, directory: Path) -> Path:
    """Write weights, config, tokenizer and chat template of the file; return the directory.

    Raises ConfigError if a package is missing or transformers cannot read the file.
    """
    if problem := missing("gguf", "reading a GGUF file"):
        raise ConfigError(problem)
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; name a GGUF file of a causal language model")
    return build_once(
        directory.absolute(),
        lambda target: _write(file, target),
    )


def _write(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    # transformers raises any of them for a file or an architecture that it cannot read.
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{file} cannot be converted ({type(error).__name__}: {error}); use a model of an"
            " architecture whose GGUF files transformers reads, or a Hugging Face directory"
        ) from error
    # The weights are dequantised; a model that names its quantisation could not be loaded again.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    # The end of a turn, which differs from the last token of the base model.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    """Convert the file that the command line names."""
    if len(sys.argv) != 3:
        sys.stderr.write("usage: python -m benchmarks.gguf_model FILE DIRECTORY\n")
        return 2
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
