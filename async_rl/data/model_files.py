"""The files of a model's directory, checked without loading the model.

Both the checks before a run and the preparation of its model report missing and damaged files.
"""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.generation import ModelConfig
from async_rl.planning.shape import refusal

# Any of them is enough: the kinds of tokenizers have different files.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_INDEX = "model.safetensors.index.json"


def missing_parts(directory: Path) -> list[str]:
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


def lacking(path: str | None, directory: Path) -> str:
    """Return the problem of a directory that has no model, or nothing."""
    missing = missing_parts(directory)
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
    if problem := lacking(path, directory):
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
