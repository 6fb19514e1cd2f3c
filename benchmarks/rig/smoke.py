"""`--smoke FOLDER` of every benchmark: tiny sizes, to show in seconds that it still runs.

Figures of a smoke mean nothing; what it writes has the keys of a real run. FOLDER has a small model
in `model`, made if it is missing, and may have a running installation in `run`, which is then used.
`tests/e2e/test_benchmarks.py` runs the smokes of all scripts of this folder.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from paceline.config import resolve_job
from paceline.front.api.documents import JobView
from paceline.front.client import Client
from paceline.front.client.calls import Spec

POSITIONS = 1024
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}="
# Of all that clients are asked to run in a smoke, one job is trained.
JOB: dict[str, Any] = {
    "name": "smoke",
    "tasks": {"environment": "arithmetic", "options": {"digits": 1}},
    "eval": {"every": 3, "tasks": 8, "options": {"split": "heldout"}},
    "sampling": {"max_tokens": 4, "max_context": 64, "on_truncation": "score"},
    "reward": ["exact"],
    "experience": {"batch_groups": 2, "group_size": 4, "filters": [], "keep_trajectories": 64},
    "rollout": {"engine": "simulated"},
    "stop": {"steps": 3},
}


def arguments(parser: ArgumentParser, **sizes: Any) -> Namespace:
    """Parse the command line; with `--smoke` these sizes are the defaults.

    Raises:
        ValueError: the parser has no such option.
    """
    parser.add_argument(
        "--smoke",
        type=Path,
        metavar="FOLDER",
        help="only show that it runs, with the small model of this folder",
    )
    given = parser.parse_args()
    if unknown := sizes.keys() - vars(given).keys():
        raise ValueError(f"sizes of the smoke: no such option: {', '.join(sorted(unknown))}")
    if given.smoke is None:
        return given
    make_model(given.smoke / "model")
    parser.set_defaults(**sizes)
    return parser.parse_args()


def make_model(folder: Path) -> Path:
    """Create the small model, unless it is there: characters, with a chat template."""
    if (folder / "config.json").exists():
        return folder
    from chaos.model import make

    make(folder, positions=POSITIONS)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


class OneJob(Client):
    """Checks each job file that it is given, and submits one small job instead of all of them."""

    def __init__(self, url: str, *, token: str, model: Path) -> None:
        super().__init__(url, token=token)
        self._job = JOB | {"model": {"path": str(model)}}

    def submit(self, spec: Spec, *, request_id: str = "", data: Path | None = None) -> JobView:
        """Submit the small job, which is the same for all requests.

        Raises:
            ConfigError: the job file is invalid.
        """
        assert isinstance(spec, dict), "benchmarks submit mappings"
        resolve_job(spec)
        return super().submit(self._job, request_id="smoke")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    make_model(Path(sys.argv[1]) / "model")
