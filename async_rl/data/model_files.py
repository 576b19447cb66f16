"""The model that a run starts from: the embedded model, a directory, or a model of the Hugging Face
hub; its files are checked without loading it.

Invariants
- What prepare_model returns holds config.json, a tokenizer and safetensors.
- The hub's cache is read before the network, which a node of a cluster often lacks.
- A directory in our cache is complete or absent (cache.py).
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.base import by_name
from async_rl.config.generation import ModelConfig, is_local_model
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.data.cache import build_once, cache_root
from async_rl.planning.shape import refusal

# Any of them is enough: the kinds of tokenizers have different files.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_INDEX = "model.safetensors.index.json"
# Other files of a repository (GGUF, ONNX, pytorch_model.bin) can be many times the size of the
# weights that are loaded.
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]
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
            directory = _from_hub(path, on_progress)
        if problem := _lacking(path, directory):
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


def _from_hub(name: str, on_progress: Callable[[float, str], None]) -> Path:
    """Return the snapshot in the local hub cache; only missing files are downloaded. Raises
    ConfigError.
    """
    from huggingface_hub import snapshot_download

    if snapshot := cached(name):
        return snapshot
    on_progress(0.0, f"downloading {name}")
    return Path(_downloaded(snapshot_download, name, allow_patterns=_FILES))


def require(name: str) -> None:
    """Raise ConfigError if this model can be neither read from the cache nor downloaded."""
    from huggingface_hub import hf_hub_download

    if not cached(name):
        # The smallest file that every model has.
        _downloaded(hf_hub_download, name, filename="config.json")


def cached(name: str) -> Path | None:
    """Return the complete snapshot of this model in the local cache, if there is one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        snapshot = Path(snapshot_download(name, local_files_only=True, allow_patterns=_FILES))
        if not _missing_parts(snapshot):
            return snapshot
    return None


def _downloaded(download: Callable[..., str], name: str, **what: Any) -> str:
    """Return what a download of the hub returns. Raises ConfigError."""
    import httpx
    from huggingface_hub.errors import HFValidationError

    try:
        return download(name, **what)
    # The hub's own errors are OSErrors, except for a malformed name and for errors of its client.
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        # Some errors of the hub continue with a page of advice, others have no text.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model.path={name} is not a directory, not in the local hub cache, and cannot be"
            f" downloaded ({type(error).__name__}: {reason}); give the directory of a model, or"
            " download it on a machine with access"
        ) from error


def _missing_parts(directory: Path) -> list[str]:
    """Return the missing parts of a model's directory, in words."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if not directory.is_dir() or not any(directory.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    return missing


def no_directory(path: str, setting: str = "model.path") -> str:
    """Return the problem of a path that is neither a directory nor a model of the hub."""
    return (
        f"{setting}={path}: there is no such directory; give a model's directory or its hub name"
        " (owner/name)"
    )


def _lacking(path: str | None, directory: Path) -> str:
    """Return the problem of a directory that has no model, or nothing."""
    missing = _missing_parts(directory)
    if not missing:
        return ""
    return (
        f"model.path={path} lacks {' and '.join(missing)} in {directory}; export the model with"
        " save_pretrained (model and tokenizer)"
    )


def model_problems(model: ModelConfig, directory: Path) -> Iterator[str]:
    """Yield the missing and damaged files of the directory that model.path names."""
    from safetensors import SafetensorError, safe_open  # of an extra

    path = model.path
    if problem := _lacking(path, directory):
        yield problem
        return
    try:
        fields = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
        named = set()
        # A model of several weight files has an index that names them.
        for index in directory.glob(_INDEX):
            content = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])
            named |= {directory / name for name in content.get("weight_map", {}).values()}
        for tokenizer in directory.glob("tokenizer.json"):
            msgspec.json.decode(tokenizer.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        yield (
            f"model.path={path}: config.json, tokenizer.json or {_INDEX} is damaged ({error}); copy"
            " it again"
        )
        return
    kind = fields.get("model_type")
    # Code of the model may register a type that no table of transformers has.
    if not (model.trust_remote_code or model.external_lib):
        if f'"{kind}"' not in _known_types():
            yield (
                f"model.path={path}: model_type={kind} of config.json is unknown to the installed"
                " transformers; correct it, upgrade transformers, or name the module that registers"
                " it (model.external_lib)"
            )
        if reason := refusal(fields):
            yield (
                f"model.path={path}: the learner cannot train model_type={kind}: {reason}; use a"
                " model that docs/models.md lists"
            )
    layers: set[str] = set()
    # Also files that only the index names: a download may have stopped in between.
    for file in sorted({*directory.glob("*.safetensors"), *named}):
        try:
            # numpy: torch would take seconds to import, and no tensor is read.
            with safe_open(file, framework="numpy") as weights:
                # Opening reads the header, and compares the file's length with it.
                names = weights.keys()
            layers |= {name.split(".")[-2] for name in names if "." in name}
        except (SafetensorError, FileNotFoundError):
            yield f"model.path={path}: {file.name} is missing or damaged; copy or export it again"
    targets = model.adapter.targets if model.adapter else []
    # Some families store weights by other names than their layers have, but never by these alone.
    if targets and layers and layers.isdisjoint(targets):
        yield (
            f"model.lora.targets={targets}: no weight in {directory} is of such a layer; name"
            " layers of the model, or give [] for all"
        )


def _known_types() -> str:
    """The source of the tables of transformers: importing them takes seconds and loads torch."""
    tables = metadata.distribution("transformers").locate_file("transformers/models/auto")
    return "".join(table.read_text() for table in Path(str(tables)).glob("*.py"))
