"""stub"""


def doctor() -> int:
    """Todo."""
    return 0
