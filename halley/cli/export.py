"""stub"""


def export() -> int:
    """Todo."""
    return 0
