"""Probes, restarts, termination."""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from kubernetes_double import Cluster
from kubernetes_double.objects import is_ready

Object = dict[str, Any]
Make = Callable[..., Object]
IDLE = "import signal; signal.pause()"
MARK = f"time.sleep(1234{os.getpid()})"
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
subprocess.Popen([sys.executable, "-c", "import time; MARK"], start_new_session=True)
print("up", flush=True)
while True: signal.pause()
""".replace("MARK", MARK)
# Takes as long to leave as the test wants.
POLITE = """
import os, signal, sys, time
def leave(*_):
    print("leaving", flush=True)
    while not os.path.exists("/tmp/go"): time.sleep(0.05)
    print("left", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True: time.sleep(0.05)
"""
HEALTH = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists("/tmp" + self.path) else 503)
        self.end_headers()
    def log_message(self, *_): pass
for name in ("started", "ready", "alive"): open("/tmp/" + name, "w").close()
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""


def status_of(cluster: Cluster, name: str) -> Object:
    found = cluster.get("Pod", name) or {}
    statuses = found.get("status", {}).get("containerStatuses", [{}])
    return statuses[0]


def probe(path: str, **more: Any) -> Object:
    """Fails the probe by status, since a timeout may just mean a busy machine."""
    asked = {"httpGet": {"path": path, "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 30}
    return {**asked, **more}


def test_a_killed_container_is_started_again(cluster: Cluster, pod: Make) -> None:
    cluster.apply([pod("lives", "print('life'); " + IDLE)])
    cluster.until(lambda: logs(cluster, "lives") == "life\n", "it runs")
    before = (cluster.get("Pod", "lives") or {})["status"]["podIP"]
    cluster.kill_pod("lives")
    cluster.until(lambda: status_of(cluster, "lives")["restartCount"] == 1, "it is restarted")
    cluster.until(lambda: cluster.ready("app=lives"), "it runs again")
    assert status_of(cluster, "lives")["lastState"]["terminated"]["exitCode"] == 137
    assert (cluster.get("Pod", "lives") or {})["status"]["podIP"] == before
    assert cluster.logs("lives", previous=True) == "life\n"


def test_a_container_that_keeps_failing_is_backed_off(cluster: Cluster, pod: Make) -> None:
    cluster.apply([pod("fails", "print('no'); raise SystemExit(3)")])

    seen: list[Object] = []

    def backed_off() -> bool:
        seen[:] = [cluster.get("Pod", "fails") or {}]
        [status] = seen[0].get("status", {}).get("containerStatuses", [{}])
        waiting = status.get("state", {}).get("waiting", {})
        return waiting.get("reason") == "CrashLoopBackOff"

    cluster.until(backed_off, "it is backed off")
    # All of one look: soon it lives again, and while it does it counts as ready.
    [pod_then] = seen
    [status] = pod_then["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert not is_ready(pod_then)


def test_a_missing_command_is_reported(cluster: Cluster, pod: Make) -> None:
    cluster.apply([pod("lost", "", container={"command": ["no-such-program"]})])
    cluster.until(
        lambda: "no-such-program" in str(status_of(cluster, "lost")), "the program is named"
    )


def test_a_service_routes_to_ready_pods_only(cluster: Cluster, pod: Make, service: Make) -> None:
    made = pod("web", HEALTH, container={"readinessProbe": probe("/ready", failureThreshold=1)})
    cluster.apply([made, service("web"), pod("asks", IDLE)])

    def answers() -> bool:
        code = "import urllib.request as u; u.urlopen('http://web:8080/alive', timeout=5)"
        return cluster.execute("asks", ["python", "-c", code])[0] == 0

    cluster.until(lambda: cluster.ready("app=web") and cluster.ready("app=asks"), "both are ready")
    cluster.until(answers, "the name stands for the pod")
    cluster.execute("web", ["rm", "/tmp/ready"])
    cluster.until(lambda: not cluster.ready("app=web"), "it is not ready")
    cluster.until(lambda: not answers(), "the name stands for nothing")
    cluster.execute("web", ["touch", "/tmp/ready"])
    cluster.until(answers, "it is back")
    assert status_of(cluster, "web")["restartCount"] == 0


def test_liveness_restarts_and_startup_comes_first(cluster: Cluster, pod: Make) -> None:
    probes = {
        "startupProbe": probe("/started", failureThreshold=100),
        "livenessProbe": probe("/alive", failureThreshold=1),
        "readinessProbe": probe("/ready"),
    }
    cluster.apply([pod("web", HEALTH, container=probes)])
    cluster.until(lambda: cluster.ready("app=web"), "it is ready")
    assert status_of(cluster, "web")["started"]
    cluster.execute("web", ["rm", "/tmp/alive"])
    cluster.until(lambda: status_of(cluster, "web")["restartCount"] == 1, "it is restarted")
    cluster.until(lambda: cluster.ready("app=web"), "it is ready again")


def test_exec_and_tcp_probes(cluster: Cluster, pod: Make) -> None:
    probes = {
        "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1},
        # It listens when it has started, which may take a while.
        "livenessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 100},
    }
    cluster.apply([pod("web", HEALTH, container=probes)])
    cluster.until(lambda: cluster.ready("app=web"), "it is ready")


def test_a_deleted_pod_may_finish(cluster: Cluster, pod: Make) -> None:
    lifecycle = {"preStop": {"exec": {"command": ["sh", "-c", "echo pre >> /proc/1/fd/1"]}}}
    made = pod(
        *("polite", POLITE),
        container={"lifecycle": lifecycle},
        terminationGracePeriodSeconds=120,
    )
    cluster.apply([made])
    cluster.until(lambda: "up\n" in logs(cluster, "polite"), "it is up")
    cluster.delete("Pod", "polite")
    cluster.until(lambda: "leaving\n" in logs(cluster, "polite"), "it was asked")
    assert cluster.execute("polite", ["touch", "/tmp/go"])[0] == 0
    cluster.until(lambda: cluster.get("Pod", "polite") is None, "it is gone")
    [log] = (cluster.folder / "logs" / cluster.namespace / "polite").rglob("main.log")
    assert log.read_text() == "up\npre\nleaving\nleft\n"


def test_a_stubborn_pod_is_killed_with_all_it_started(cluster: Cluster, pod: Make) -> None:
    cluster.apply([pod("stubborn", STUBBORN, terminationGracePeriodSeconds=2)])
    cluster.until(lambda: "up\n" in logs(cluster, "stubborn"), "it is up")
    assert MARK in cluster.execute("stubborn", ["ps", "ax", "-o", "args"])[1]
    started = time.monotonic()
    cluster.delete("Pod", "stubborn")
    cluster.until(lambda: cluster.get("Pod", "stubborn") is None, "it is gone")
    assert time.monotonic() - started >= 2
    assert not running(MARK)


@pytest.mark.parametrize("grace_s", [0, 1])
def test_a_second_deletion_shortens_the_grace(cluster: Cluster, pod: Make, grace_s: int) -> None:
    cluster.apply([pod("stubborn", STUBBORN, terminationGracePeriodSeconds=3600)])
    cluster.until(lambda: "up\n" in logs(cluster, "stubborn"), "it is up")
    cluster.delete("Pod", "stubborn")
    cluster.until(lambda: "asked\n" in logs(cluster, "stubborn"), "it was asked")
    cluster.delete("Pod", "stubborn", grace_s=grace_s)
    cluster.until(lambda: cluster.get("Pod", "stubborn") is None, "it is gone")
    cluster.until(lambda: not running(MARK), "its processes are gone")


def test_a_terminated_init_container_starts_nothing(cluster: Cluster, pod: Make) -> None:
    first = {"name": "first", "image": "test", "command": ["python", "-u", "-c", POLITE]}
    made = pod("never", "print('no')", initContainers=[first], terminationGracePeriodSeconds=120)
    cluster.apply([made])
    statuses = "initContainerStatuses"

    def begun() -> bool:
        status = (cluster.get("Pod", "never") or {}).get("status", {})
        return "running" in status.get(statuses, [{"state": {}}])[0]["state"]

    cluster.until(begun, "the first container runs")
    folder = cluster.folder / "logs" / cluster.namespace / "never"
    [log] = folder.rglob("first.log")
    cluster.until(lambda: "up\n" in log.read_text(), "it is up")
    assert cluster.execute("never", ["touch", "/tmp/go"], container="first")[0] == 0
    cluster.delete("Pod", "never")
    cluster.until(lambda: cluster.get("Pod", "never") is None, "it is gone")
    assert log.read_text() == "up\nleaving\nleft\n"
    assert not list(folder.rglob("main.log"))


def running(text: str) -> bool:
    return any(
        text in " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline"])
    )


def logs(cluster: Cluster, name: str) -> str:
    found = cluster.get("Pod", name) or {}
    phase = found.get("status", {}).get("phase", "Pending")
    return "" if phase == "Pending" else cluster.logs(name)
