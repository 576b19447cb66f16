"""Short sentences with a given word, for conf/real.yaml: a small pretrained model often adds more
text than the prompt requests.

A response is right if it is one sentence that contains the word, has at least four words and at
most as many as the prompt allows, repeats neither a word of four letters or more nor any word at
once, and closes with a full stop or an exclamation mark. A regular expression judges it.
Invariant: a word of a held-out prompt is in no training prompt. The rows are
the same in every process.
"""

from collections.abc import Iterator, Sequence
from typing import Any

_NOUNS = """
apple anchor autumn bakery ballet basket beach bicycle bird blanket boat book bottle branch bread
bridge brother butter camera candle canyon carpet castle cat chair cherry church circus city cloud
coat coffee corner cousin crown dance desert doctor dog door dragon dream eagle engine evening
farmer feather fence field fire fish flower forest fox friend frog garden ghost gift glass gold
grandmother grass guitar hammer harbor hat hill honey horse hotel house island jacket jewel judge
kettle key king kitchen kitten knife ladder lake lamp lantern leaf lemon letter library lion market
meadow melody mirror moon morning mother mountain mouse museum music neighbor night ocean orange
orchard owl painter paper parrot pencil piano picture pillow pirate planet poem potato prince
puppy queen rabbit rain river road robot rocket rose sailor salt sand school sea shadow sheep ship
shirt shoe silver singer sister sky sleep snow soldier song soup spider spoon spring star station
stone storm story street sugar summer sun table teacher temple tiger tower town train tree turtle
uncle valley village violin wagon wall water wedding whale wheel wind window winter wolf
"""
_FEWEST_WORDS = 4
_MOST_WORDS = range(8, 13)
_HELD_OUT_EVERY = 5

Row = dict[str, Any]


def train() -> Iterator[Row]:
    """Yield the training rows."""
    return _rows([word for i, word in enumerate(_NOUNS.split()) if i % _HELD_OUT_EVERY])


def held_out() -> Iterator[Row]:
    """Yield the rows of every fifth word, with the lengths in turn."""
    return _rows(_NOUNS.split()[::_HELD_OUT_EVERY])


def pattern(word: str, most: int) -> str:
    """Return the regular expression of the right responses."""
    inner = f"{{{_FEWEST_WORDS - 1},{most - 1}}}"
    repeats = r"\b(?:([a-z]{4,})s?\b.*\b\1s?\b|([a-z]+),? \2\b)"
    return rf'(?i)\A(?=.*\b{word}s?\b)(?!.*{repeats})"?(?:[a-z\'’-]+,? ){inner}[a-z\'’-]+[.!]"?\Z'


def _rows(words: Sequence[str]) -> Iterator[Row]:
    for turn in range(len(_MOST_WORDS)):
        for number, word in enumerate(words):
            most = _MOST_WORDS[(number + turn) % len(_MOST_WORDS)]
            yield {
                "id": f"{word}/{most}",
                "data_source": "short_sentences",
                "prompt": f'Write one sentence of at most {most} words with the word "{word}".',
                "tests": [{"kind": "answer", "rule": "regex", "expected": pattern(word, most)}],
            }
