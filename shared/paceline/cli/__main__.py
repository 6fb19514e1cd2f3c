"""`python -m paceline.cli`: the `paceline` command."""

import sys

from paceline.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
