"""Values that a `with` block closes."""

from typing import Self


class Closing:
    """Base of a value that has to be closed."""

    def close(self) -> None:
        """Give back what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
