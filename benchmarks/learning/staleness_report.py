"""Tables of the league."""


def report() -> None:
    """Print every table."""
