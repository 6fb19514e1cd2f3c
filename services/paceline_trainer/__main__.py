"""`python -m torch.distributed.run --nproc-per-node W -m paceline_trainer SETTINGS.yaml`."""

from __future__ import annotations

import os
import sys

from paceline.platform.program import importing, leave

with importing():
    from paceline_trainer.start import run

if __name__ == "__main__":
    leave(run(sys.argv[1:], os.environ))
