"""Former name of `paceline.front.cli`, until the next release but one."""

import sys
from warnings import warn

from paceline.front.cli import main

__all__ = ["main"]
warn("paceline.cli is paceline.front.cli now", DeprecationWarning, stacklevel=2)

if __name__ == "__main__":
    sys.exit(main())
