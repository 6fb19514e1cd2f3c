"""A process that computes a model known only by its `config.json`, which a user has written.

`python -P -m MODULE FOLDER`: FOLDER has the `config.json`. The last line that it prints is JSON:
`{"wrong": why}`, where empty means that nothing is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import InvalidError
from paceline.isolation.sandbox.hold import Hold
from paceline.models.foreign_code import of_model
from paceline.models.shallow import narrow, num_elements, tiny

MODULES = {
    "trainer": "paceline_trainer.step.submit_probe",
    "torch": "paceline_rollout.engines.torch.submit_probe",
}
"""What computes: the trainer, and engines by their `kind`."""
WRONG = "wrong"
_CPU_S = 30
_MEMORY_BYTES = 16 << 30  # of addresses: torch for GPUs maps several GiB of libraries
_MOST_PARAMETERS = 1 << 29  # of a layer


def answer(read: Callable[[Path], Any], check: Callable[[Any], object]) -> NoReturn:
    """Seal this process, check the model and end.

    `read`: the configuration of a folder. `check` raises `InvalidError` for a model that cannot be
    computed, whose parameters it makes up.
    """
    folder = Path(sys.argv[1])
    hold = Hold(0, 0, _CPU_S, _MEMORY_BYTES, what="what computes models of jobs")
    hold.apply(readable=[folder, _packages()])
    print(json.dumps({WRONG: problem(read, check, folder)}), flush=True)
    os._exit(0)  # what is torn down would only take time


def _packages() -> Path:
    """Where transformers is, which imports families late; not always this interpreter's own."""
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).resolve().parents[1]


def problem(read: Callable[[Path], Any], check: Callable[[Any], object], folder: Path) -> str:
    """Why the model cannot be computed; empty: it can, or it is too large to be tried here.

    The tiny model is only for speed: what it is refused for is said by one with the real heads.
    """
    try:
        config = read(folder)
        with of_model("config.json"):
            forms = tiny(config), narrow(config)
    except InvalidError as error:
        return error.message
    problems = list[str]()
    for form in forms:
        if num_elements(form) > _MOST_PARAMETERS:
            return ""
        try:
            check(form)
            return ""
        except InvalidError as error:
            problems.append(error.message)
    return problems[-1]
