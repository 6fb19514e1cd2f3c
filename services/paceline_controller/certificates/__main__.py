"""`python -m paceline_controller.certificates ISSUE.yaml [--set FIELD=VALUE ...]`."""

from __future__ import annotations

import sys

from paceline.platform.program import importing, leave

with importing():
    from paceline_controller.certificates.start import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
