"""What several commands check, or read, before they start ranks."""

from importlib.util import find_spec


def check_package(name: str, *, extra: str, option: str) -> None:
    """Check that an optional package is installed, before the work that ends in its use.

    Args:
        name: of the package.
        extra: of halley-moe, which brings it.
        option: what the user gave that needs it, with its value.

    Raises:
        ValueError: it is not installed; names the command that installs it.
    """
    if find_spec(name) is None:
        raise ValueError(
            f"{option} must have the package {name}: pip install 'halley-moe[{extra}]'"
        )
