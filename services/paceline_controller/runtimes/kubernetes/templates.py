"""The pod templates that the chart has rendered, one file for each kind of workload and pool."""

from __future__ import annotations

from pathlib import Path

import yaml

from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.kubernetes.resources import Object


def load_template(folder: Path, wanted: Wanted) -> Object:
    """Read again each time: the files of a mounted ConfigMap change under a running process.

    Raises:
        ConfigError: there is none for this workload, or it is not a pod template.
    """
    name = "trainer" if wanted.kind is WorkerKind.TRAINER else f"rollout-{wanted.pool}"
    path = folder / f"{name}.yaml"
    try:
        template = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no pod template for {wanted.name}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(template, dict) or "spec" not in template:
        raise ConfigError(f"{path}: is not a pod template")
    return template
