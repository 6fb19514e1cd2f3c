"""`python -m paceline.front.cli`: the `paceline` command."""

import sys

from paceline.front.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
