"""stub"""


def trace() -> int:
    """Todo."""
    return 0
