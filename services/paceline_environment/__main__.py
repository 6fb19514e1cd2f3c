"""`python -m paceline_environment SETTINGS.yaml`."""

import sys

from paceline.server.chassis import main
from paceline_environment.service import build

if __name__ == "__main__":
    sys.exit(main(build))
