"""MLflow: one run for a job, on the server of `MLFLOW_TRACKING_URI`.

That and the credentials (`MLFLOW_TRACKING_TOKEN`, ...) come from the environment.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun
from paceline_tracking.trackers.tables import COLUMNS, place, table

ROW = "paceline/row"
JOB = "paceline.job"
_END = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_MOST_PARAMS = 100
_MOST_PARAM_CHARS = 6000
_MOST_METRICS = 1000


def mlflow(run: TrackedRun, *, experiment: str = "paceline") -> MLflow:
    """A tracker whose run carries the job's id as a tag.

    Raises:
        LookupError: the environment names no server.
    """
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not server:
        raise LookupError("set MLFLOW_TRACKING_URI in the environment of the tracking service")
    # The library's own retries would outlast the time limit of a call.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow import MlflowClient

    client = MlflowClient(server)
    return MLflow(run, client, server=server, experiment=_experiment(client, experiment))


class MLflow:
    """Metrics of a row go in one call, with its number among them."""

    def __init__(self, run: TrackedRun, client: Any, *, server: str, experiment: str) -> None:
        self._run = run
        self._client = client
        found = client.search_runs(
            [experiment], filter_string=f"tags.`{JOB}` = '{run.run_id}'", max_results=1
        )
        opened = found[0] if found else self._begin(experiment)
        self._id = opened.info.run_id
        last = opened.data.metrics.get(ROW)
        self.rows = 0 if last is None else int(last) + 1
        self.url = f"{_address(server)}/#/experiments/{experiment}/runs/{self._id}"

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Metrics at their step; samples as a table beside them."""
        from mlflow.entities import Metric

        for point in points:
            step, now_ms = place(self._run, point), int(time.time() * 1000)
            if point.samples:
                self._samples(point, step)
            metrics = [Metric(name, value, now_ms, step) for name, value in point.values.items()]
            # The number of the row comes last: what is before it is there. Its own step, since
            # the value that a run shows is that of the greatest step, and steps go back.
            if point.index >= 0:
                metrics.append(Metric(ROW, float(point.index), now_ms, point.index))
            for part in _parts(metrics, _MOST_METRICS):
                self._client.log_batch(self._id, metrics=part, synchronous=True)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """The summary as a file, and how the job ended."""
        self._client.log_dict(self._id, {"state": state, **summary}, "summary.json")
        self._client.set_terminated(self._id, status=_END.get(state, "FAILED"))

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, experiment: str) -> Any:
        from mlflow.entities import Param

        tags = {JOB: self._run.run_id, "paceline.tenant": self._run.tenant}
        made = self._client.create_run(experiment, run_name=self._run.name, tags=tags)
        params = [Param(key, value) for key, value in _flat(self._run.config, "")]
        for part in _parts(params, _MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=part)
        self._client.log_dict(made.info.run_id, dict(self._run.config), "job.json")
        return made

    def _samples(self, point: TrackedPoint, step: int) -> None:
        """In the layout of MLflow's tables, one file for each row that has some."""
        path = f"samples/row-{point.index:06d}.json"
        content = {"columns": list(COLUMNS), "data": table(point.step, point.samples)}
        self._client.log_text(self._id, json.dumps(content), path)


def _address(server: str) -> str:
    """Of the server, without who logs in there."""
    return re.sub(r"://[^/]*@", "://", server.partition("?")[0]).rstrip("/")


def _experiment(client: Any, name: str) -> str:
    """The id of an experiment, made if there is none."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:  # made by another job at the same moment
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), most):
        yield items[begin : begin + most]


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value)[:_MOST_PARAM_CHARS]
