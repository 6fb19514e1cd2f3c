"""`python -m paceline_controller SETTINGS.yaml`."""

import sys

from paceline.server.chassis import main
from paceline_controller.service import build

if __name__ == "__main__":
    sys.exit(main(build))
