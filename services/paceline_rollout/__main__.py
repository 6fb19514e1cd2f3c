"""`python -m paceline_rollout SETTINGS.yaml`."""

from __future__ import annotations

from paceline.server.chassis import main
from paceline_rollout.service import build

if __name__ == "__main__":
    raise SystemExit(main(build))
