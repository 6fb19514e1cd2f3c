"""`python -m paceline_gateway SETTINGS.yaml`."""

import sys

from paceline.server.chassis import main
from paceline_gateway.service import build

if __name__ == "__main__":
    sys.exit(main(build))
