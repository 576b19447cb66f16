"""The tokenizer of a run, and the number of token ids of its model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(config: RunConfig, model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a run: from the model's directory, or from data.tokenizer if it is set."""
    from transformers import AutoTokenizer

    import_external(config.model)
    directory = config.data.tokenizer or str(model_path)
    return AutoTokenizer.from_pretrained(
        directory, trust_remote_code=config.model.trust_remote_code, local_files_only=True
    )


def load_vocabulary_size(config: RunConfig, model_path: Path) -> int:
    """The number of token ids of the model. Its tokenizer may not use all of them."""
    from transformers import AutoConfig

    import_external(config.model)
    model = AutoConfig.from_pretrained(
        model_path, trust_remote_code=config.model.trust_remote_code, local_files_only=True
    )
    return int(model.get_text_config().vocab_size)


def spare_torch(config: RunConfig) -> None:
    """For a process that needs a tokenizer and no model: `import torch` fails from now on, as if it
    were not installed.

    transformers would load it along, which takes two thirds of the time and 260 MB. A tokenizer
    with its own code may need it.
    """
    if not config.model.trust_remote_code:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # about the missing torch
