"""The model's directory, ready to be loaded by learner and generators: the embedded model from the
cache, or the model that model.path names.

Invariants
- What prepare_model returns holds config.json, a tokenizer and safetensors.
- A cached model is complete or absent: built in the same directory and renamed; a file lock keeps
  two runs from building it twice.
- The key of a cached model hashes its settings and the files that make it, so a change of any of
  them builds another one.
torch is imported only if the embedded model has to be built.
"""

import hashlib
import importlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec

from async_rl.config.base import by_name
from async_rl.config.generation import is_local_model
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.data.cache import build_once, cache_root
from async_rl.data.embedded import TinyCoder, tiny_coder_of
from async_rl.data.hub import from_hub
from async_rl.data.model_files import lacking, no_directory

RECIPE = (
    "concepts.toml",
    "corpus.py",
    "embedded.py",
    "list_functions.py",
    "tiny_coder.py",
    "vocabulary.py",
)
"""The files that make the embedded model. The key has their content, so that nobody has to remember
to raise a version.
"""

Progress = Callable[[float, str], None]


def prepare_model(
    config: RunConfig, on_progress: Progress, *, embedded: TinyCoder | None = None
) -> Path:
    """Return the directory of the model that the run starts from, built or downloaded if needed.

    on_progress(fraction, text) is called during that time.  embedded: the model to build, whatever
    the configuration says.  Raises ConfigError if model.path or the cache is unusable.
    """
    path = config.model.path
    if path is None:
        directory = _embedded(config, embedded or tiny_coder_of(config), on_progress)
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
    return build_once(target, build)


def cached_model_path(config: RunConfig, embedded: TinyCoder | None = None) -> Path:
    """Return the cache directory of the embedded model; it need not exist."""
    recipe = [resources.files(__package__).joinpath(name).read_bytes() for name in RECIPE]
    settings = msgspec.json.encode(embedded or tiny_coder_of(config))
    key = hashlib.sha256(b"".join([*recipe, settings])).hexdigest()[:16]
    return cache_root() / f"tiny_coder-{key}"


def _embedded(config: RunConfig, embedded: TinyCoder, on_progress: Progress) -> Path:
    from safetensors import SafetensorError  # of an extra

    def build(directory: Path) -> None:
        # Not at the top: it imports torch, which a run with another model does not need here.
        tiny_coder = importlib.import_module("async_rl.data.tiny_coder")
        tiny_coder.make_tiny_coder(directory, embedded, on_progress)

    target = cached_model_path(config, embedded)
    try:
        return build_once(target, build, on_wait=lambda text: on_progress(0.0, text))
    # A full disk is not an OSError while weights are written.
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the embedded model cannot be kept in {target.parent}: {error}; set XDG_CACHE_HOME to"
            " a writable directory with space"
        ) from error
