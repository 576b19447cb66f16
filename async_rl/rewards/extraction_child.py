"""The child process that looks for the programs in large responses: one line in, one line out."""

from __future__ import annotations

import os

import msgspec

from async_rl.core.frozen import Value
from async_rl.rewards.extraction import Block, complete_blocks
from async_rl.rewards.verifier.child_process import ParentPipes


class ExtractionQuery(Value):
    """One response."""

    response: str


class ExtractionResult(Value):
    """Its usable blocks, in order."""

    blocks: list[Block]


def main() -> None:
    """Answer line by line until the input ends."""
    parent = ParentPipes()
    with os.fdopen(parent.incoming, "rb") as lines:
        for line in lines:
            query = msgspec.json.decode(line, type=ExtractionQuery)
            parent.send(ExtractionResult(blocks=complete_blocks(query.response)))


if __name__ == "__main__":
    main()
