"""`paceline doctor`: what this machine offers to jobs."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from paceline.config.precision import fast_dtype
from paceline.errors import UnavailableError
from paceline.sandbox.probe import probe


def doctor(_: Namespace) -> int:
    """Print a line per finding; 1 if the reward `code` cannot run programs here."""
    print(f"dtype: auto is {fast_dtype()}")
    try:
        print(f"sandbox: {asyncio.run(probe())}")
    except UnavailableError as error:
        print(f"{error.message}; the reward `code` does not work here")
        return 1
    return 0
