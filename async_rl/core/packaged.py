"""Tables that are files of a package."""

from importlib import resources

import msgspec

from async_rl.core.frozen import T


def read_packaged(package: str, name: str, kind: type[T]) -> T:
    """Return a toml or yaml file of this package. Raises msgspec.ValidationError with the path."""
    decode = msgspec.toml.decode if name.endswith(".toml") else msgspec.yaml.decode
    return decode(resources.files(package).joinpath(name).read_bytes(), type=kind)
