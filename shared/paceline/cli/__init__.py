"""The `paceline` command. Handlers are imported when they are called, so that `--help` is quick."""

from paceline.cli.entry import main

__all__ = ["main"]
