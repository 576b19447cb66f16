"""The model's directory, ready to be loaded by learner and generators: the embedded model, or the
model that model.path names.

Invariants
- What prepare_model returns holds config.json, a tokenizer and safetensors.
- A directory in the cache is complete or absent: built beside its place and renamed; a file lock
  keeps two runs from building it twice.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.config.base import by_name
from async_rl.config.generation import is_local_model
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.data.cache import build_once, cache_root
from async_rl.data.hub import from_hub
from async_rl.data.model_files import lacking, no_directory

EMBEDDED = Path(__file__).with_name("embedded")
"""The embedded task and its models, made by benchmarks/embedded."""
_RETRYING_ROLLOUT = "async_rl.examples.run_and_retry:rollout"  # conf/grpo_code_retry.yaml
_RETRYING_AGENT = "async_rl.examples.tool_agent:solve"  # conf/agent_code.yaml
Progress = Callable[[float, str], None]


def embedded_model(config: RunConfig) -> Path:
    """Return the directory of the embedded model that fits the run's rollout: the one that has read
    second turns, if the rollout has them.
    """
    asks_again = config.rollout.fn == _RETRYING_ROLLOUT or config.agent.fn == _RETRYING_AGENT
    return EMBEDDED / ("tiny_coder_retries" if asks_again else "tiny_coder")


def prepare_model(config: RunConfig, on_progress: Progress) -> Path:
    """Return the directory of the model that the run starts from, downloaded if needed.

    on_progress(fraction, text) is called during that time. Raises ConfigError if model.path or the
    cache is unusable.
    """
    path = config.model.path
    if path is None:
        directory = embedded_model(config)
    else:
        directory = Path(path).expanduser()
        if not directory.is_dir():
            # A misspelled directory must not be looked up at the hub under that name.
            if is_local_model(path):
                raise ConfigError(no_directory(path))
            directory = from_hub(path, on_progress)
        if problem := lacking(path, directory):
            raise ConfigError(problem)
        directory = directory.resolve()
    return _overridden(directory, config) if config.model.override_config else directory


def _overridden(directory: Path, config: RunConfig) -> Path:
    """A directory in the cache that differs in the fields that model.override_config names."""
    from transformers import AutoConfig

    import_external(config.model)
    text = (directory / "config.json").read_bytes()
    fields = msgspec.json.decode(text, type=dict)
    defaults = AutoConfig.from_pretrained(
        directory, trust_remote_code=config.model.trust_remote_code
    )
    known = fields.keys() | defaults.to_dict()
    for field, value in by_name(config.model.override_config).items():
        if field not in known:
            raise ConfigError(
                f"model.override_config={field}={value}: {directory} has no such field; it has"
                f" {', '.join(sorted(known))}"
            )
        try:
            fields[field] = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"model.override_config={field}={value}: not JSON ({error}); quote text:"
                f' {field}="x"'
            ) from error
    # The configuration of the model is part of the key: an updated model must not keep an old copy.
    key = hashlib.sha256(
        b"\n".join([bytes(directory), text, msgspec.json.encode(config.model.override_config)])
    ).hexdigest()[:16]

    def build(target: Path) -> None:
        target.mkdir()
        # Links: the weights may be hundreds of gigabytes.
        for file in directory.iterdir():
            if file.name != "config.json":
                (target / file.name).symlink_to(file)
        (target / "config.json").write_bytes(msgspec.json.encode(fields))

    target = cache_root() / f"overridden-{key}"
    try:
        return build_once(target, build)
    except OSError as error:
        raise ConfigError(
            f"a model with model.override_config cannot be kept in {target.parent}: {error}; set"
            " XDG_CACHE_HOME to a writable directory with space"
        ) from error
