"""`python -m paceline_experience SETTINGS.yaml`."""

from __future__ import annotations

import sys

from paceline.server.chassis import main
from paceline_experience.service import build

if __name__ == "__main__":
    sys.exit(main(build))
