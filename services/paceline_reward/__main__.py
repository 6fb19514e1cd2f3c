"""`python -m paceline_reward SETTINGS.yaml`."""

import sys

from paceline.server.chassis import main
from paceline_reward.service import build

if __name__ == "__main__":
    sys.exit(main(build))
