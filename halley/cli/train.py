"""stub"""


def train() -> int:
    """Todo."""
    return 0
