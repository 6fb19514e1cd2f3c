"""The `paceline` command. Handlers are imported only when called, so that `--help` is fast."""

from paceline.front.cli.entry import main

__all__ = ["main"]
