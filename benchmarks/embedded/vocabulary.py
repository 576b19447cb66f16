"""The embedded model's tokenizer: byte-level BPE over the task's own phrases and code, one token
per word or run of signs.

Invariants: decoding returns exactly the encoded text (all 256 bytes are in the vocabulary); equal
texts produce equal tokenizers; encoding plain text never produces the end-of-sequence or padding
token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
