"""`python -m paceline_tracking SETTINGS.yaml`."""

import sys

from paceline.server.chassis import main
from paceline_tracking.service import build

if __name__ == "__main__":
    sys.exit(main(build))
