"""The embedded model's tokenizer: byte-level BPE over the task's own phrases and code, one token
per word or run of signs.

Invariants: decoding returns exactly the encoded text (all 256 bytes are in the vocabulary); equal
texts produce equal tokenizers; encoding plain text never produces the end-of-sequence or padding
token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|end|>"
PAD = "<|pad|>"
_MAX_VOCABULARY = 1024
_PIECES = r"\n *| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z0-9_]+|\s"


def build_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerBase:
    """Train the tokenizer on `texts`; merges never cross the boundary of a word, a digit, a run of
    signs or an indented line start.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # One digit per token: numbers of the tests then share tokens, and sums can be learned.
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,
        special_tokens=[PAD, END],
        # All 256 bytes, so that any text can be encoded, also one that the corpus lacks.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        # The cleaning would change spaces of programs.
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


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
