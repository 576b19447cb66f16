"""The choice of the generation engine that `generation.engine` names.

Only this file knows every engine. The engines import the interface, `generation/engine.py`, which
knows none of them.
"""

from pathlib import Path

from async_rl.config.generation import ENGINES
from async_rl.config.plugins import ENGINE, import_external, load_function
from async_rl.config.run import RunConfig
from async_rl.generation.engine import OpenEngine


def engine_opener(config: RunConfig, model_path: Path, *, rank: int = 0) -> OpenEngine:
    """Import the engine that generation.engine names and return the function that starts it;
    blocks for seconds. Raises ConfigError if the engine refuses the settings or the model.

    rank: parallel generators get different random numbers by it.
    """
    import_external(config.model)
    seed = config.seed + rank
    # Imported here: vLLM reads the variables of `prepare_environment` at import.
    if config.generation.is_vllm:
        from async_rl.generation.vllm.opening import vllm_opener

        return vllm_opener(config, model_path, seed)
    if config.generation.engine not in ENGINES:
        opener = load_function("generation.engine", config.generation.engine, ENGINE)
        opened: OpenEngine = opener(config, model_path, seed=seed)
        return opened
    from async_rl.generation.hf import hf_opener

    return hf_opener(config, model_path, seed)
