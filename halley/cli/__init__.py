"""The commands of the program ``halley``, which ``halley --help`` lists."""

from halley.cli.main import main


__all__ = ["main"]
