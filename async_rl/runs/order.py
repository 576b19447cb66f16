"""The training prompts of a run at the positions of its groups."""

from pathlib import Path

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.reader import CHOSEN, LEFT
from async_rl.config.run import RunConfig
from async_rl.data.prompt_file import PROMPTS_FILE, RunPrompts, open_prompts


def issued_prompts(run_dir: Path, config: RunConfig, store: Connection) -> RunPrompts | None:
    """Return the prompts of a run at their positions; None for a copy from the mirror, which has no
    prompts.sqlite.
    """
    if not (run_dir / PROMPTS_FILE).is_file():
        return None
    found = open_prompts(run_dir / PROMPTS_FILE, config, vocabulary_size=0)
    found.order.restore(store.execute(LEFT), store.execute(CHOSEN))
    return found
