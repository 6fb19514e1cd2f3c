"""Former name of `paceline.platform.server.issue_keys`, until the next release but one."""

import sys
from warnings import warn

from paceline.platform.server.issue_keys import main

__all__ = ["main"]
warn(
    "paceline.server.issue_keys is paceline.platform.server.issue_keys now",
    DeprecationWarning,
    stacklevel=2,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
