"""The command line; ``halley --help``."""

from halley.cli.main import main


__all__ = ["main"]
