"""The engine of transformers, which leaves a note when it starts."""

from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.generation.engine import Engine, OpenEngine
from async_rl.generation.hf import hf_opener


def open_counted(config: RunConfig, model_path: Path, *, seed: int) -> OpenEngine:
    """Open the engine of transformers and note its seed."""
    opener = hf_opener(config, model_path, seed)

    async def start() -> Engine:
        run_dir = Path(config.output_dir) / str(config.run_name)
        (run_dir / "counted").write_text(str(seed))
        return await opener()

    return start
