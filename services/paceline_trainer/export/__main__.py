"""`python -m paceline_trainer.export < REQUEST`: prints the folder; 2 if there is none."""

from __future__ import annotations

import json
import sys

from paceline.platform.program import importing, leave

with importing():
    from safetensors import SafetensorError

    from paceline.config.load import validate
    from paceline.errors import PacelineError, UnavailableError
    from paceline_trainer.export.folder import export
    from paceline_trainer.export.request import ExportRequest

EXIT_REFUSED, EXIT_UNAVAILABLE = 2, 3


def main() -> int:
    """Read a request from standard input and export."""
    try:
        print(export(validate(ExportRequest, json.load(sys.stdin))))
    except UnavailableError as error:
        print(f"paceline: {error.message}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except PacelineError as error:
        print(f"paceline: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    except (OSError, SafetensorError) as error:  # no permission, disk full, ...
        print(f"paceline: export failed: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    leave(main())
