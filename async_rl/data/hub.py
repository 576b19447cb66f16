"""Models of the Hugging Face hub: in the local cache, downloaded, or refused before a run starts.

Invariant: the cache is asked before the network, which a node of a cluster often lacks.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.core.errors import ConfigError
from async_rl.data.model_files import missing_parts

# Other files of a repository (GGUF, ONNX, pytorch_model.bin) can be many times the size of the
# weights that are loaded.
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]


def from_hub(name: str, on_progress: Callable[[float, str], None]) -> Path:
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
        if not missing_parts(snapshot):
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
