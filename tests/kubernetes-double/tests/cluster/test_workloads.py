"""Deployments, StatefulSets and Jobs."""

import functools
from collections.abc import Callable
from typing import Any

import httpx

from kubernetes_double import Cluster
from kubernetes_double.objects import is_ready
from kubernetes_double.patience import PATIENCE_S

Object = dict[str, Any]
Make = Callable[..., Object]
WEB = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"VERSION")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""
# No answer for a while says how busy the machine is: the time limit is generous.
PROBE = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 30}
READY = {"readinessProbe": PROBE}
# Not ready before the test says so.
GATED = WEB.replace("200", "200 if os.path.exists('/tmp/open') else 503")
OPEN = "open('/tmp/open', 'w').close()\n"
LEAVE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
IDLE = LEAVE + "signal.pause()"


def web(workload: Make, version: str, **more: Any) -> Object:
    return workload(
        *("Deployment", "web", WEB.replace("VERSION", version)), container=READY, more=more
    )


def names(cluster: Cluster, selector: str) -> set[str]:
    pods = cluster.pods(selector)
    return {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def test_pods_above_a_quota_are_reported(cluster: Cluster, workload: Make) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    cluster.apply([{**quota, "spec": {"hard": {"pods": "0"}}}])
    job = workload("Job", "runs", IDLE, restartPolicy="Never")
    cluster.apply([workload("Deployment", "web", IDLE), job])
    kinds = {"Job", "ReplicaSet"}

    def told() -> set[str]:
        return {
            event["involvedObject"]["kind"]
            for event in cluster.list("v1/Event")
            if event["reason"] == "FailedCreate" and "exceeded quota: few" in event["message"]
        }

    cluster.until(lambda: told() == kinds, "both have told")

    def failure() -> list[str]:
        status = (cluster.get("Deployment", "web") or {}).get("status", {})
        return [c["reason"] for c in status.get("conditions", ()) if c["type"] == "ReplicaFailure"]

    cluster.until(lambda: failure() == ["FailedCreate"], "the Deployment says so")
    cluster.delete("ResourceQuota", "few")
    cluster.until(lambda: len(cluster.pods()) == 2, "pods are made after all")
    cluster.until(lambda: not failure(), "nothing fails any more")


def test_a_service_spreads_over_a_deployment(
    cluster: Cluster, workload: Make, service: Make, pod: Make
) -> None:
    made = web(workload, "one", replicas=2)
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["command"][-1] = WEB.replace('b"VERSION"', "os.environ['HOSTNAME'].encode()")
    container["ports"] = [{"name": "http", "containerPort": 8080}]
    port = {"name": "main", "port": 80, "targetPort": "http"}
    cluster.apply([made, service("web", ports=[port]), pod("asks", IDLE)])
    cluster.until(lambda: cluster.ready("app=web") == 2 and cluster.ready("app=asks"), "all run")
    for name in ("web", f"web.{cluster.namespace}", f"web.{cluster.namespace}.svc.cluster.local"):
        seen: set[str] = set()

        def asked(name: str = name, seen: set[str] = seen) -> bool:
            code = (
                "import urllib.request as u\n"
                f"for _ in range(8): print(u.urlopen('http://{name}', timeout=20).read().decode())"
            )
            ended, said = cluster.execute("asks", ["python", "-c", code], timeout_s=60)
            seen.update([] if ended else said.split())
            return len(seen) == 2

        cluster.until(asked, f"both answer as {name}")
    host, reached = cluster.address(cluster.pods("app=web")[0]["metadata"]["name"], 8080)
    assert fetch_from_here(host, reached).startswith(b"web-")


def fetch_from_here(host: str, port: int) -> bytes:
    return httpx.get(f"http://{host}:{port}", timeout=PATIENCE_S).content


def test_a_rolling_update_keeps_enough_pods(cluster: Cluster, workload: Make) -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    more = {"replicas": 2, "strategy": rolling}

    def gated(code: str) -> Object:
        return workload("Deployment", "web", code, container=READY, more=more)

    cluster.apply([gated(OPEN + GATED)])
    cluster.until(lambda: cluster.ready("app=web") == 2, "the first are ready")
    old = names(cluster, "app=web")
    fewest, most = 2, 2

    def look() -> list[Object]:
        nonlocal fewest, most
        pods = cluster.pods("app=web")
        staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        fewest, most = min(fewest, sum(map(is_ready, pods))), max(most, len(staying))
        return staying

    opened: set[str] = set()

    def begun() -> list[str]:
        staying = [pod for pod in look() if pod["status"]["phase"] == "Running"]
        return [n for pod in staying if (n := pod["metadata"]["name"]) not in old | opened]

    cluster.apply([gated(GATED)])
    for _ in range(2):
        cluster.until(begun, "another one runs")
        [name] = begun()
        assert cluster.execute(name, ["touch", "/tmp/open"])[0] == 0
        opened.add(name)

    def replaced() -> bool:
        look()
        status = (cluster.get("Deployment", "web") or {})["status"]
        return status["updatedReplicas"] == status["readyReplicas"] == status["replicas"] == 2 and (
            not old & names(cluster, "app=web")
        )

    cluster.until(replaced, "the new ones are ready")
    assert (fewest, most) == (2, 3)
    status = cluster.get("Deployment", "web") or {}
    assert status["status"]["observedGeneration"] == status["metadata"]["generation"]


def test_recreate_never_has_both(cluster: Cluster, workload: Make) -> None:
    recreate = {"type": "Recreate"}
    cluster.apply([web(workload, "one", replicas=1, strategy=recreate)])
    cluster.until(lambda: cluster.ready("app=web") == 1, "the first is ready")
    [old] = names(cluster, "app=web")
    cluster.apply([web(workload, "two", replicas=1, strategy=recreate)])

    def replaced() -> bool:
        assert len(cluster.pods("app=web")) <= 1
        return cluster.ready("app=web") == 1 and old not in names(cluster, "app=web")

    cluster.until(replaced, "the second is ready")


def endpoints(cluster: Cluster, service: str) -> list[Object]:
    return (cluster.get("EndpointSlice", service) or {}).get("endpoints") or []


def test_the_cheapest_pods_go_first(cluster: Cluster, workload: Make, service: Make) -> None:
    cluster.apply([workload("Deployment", "idle", IDLE, more={"replicas": 3})])
    cluster.until(lambda: cluster.ready("app=idle") == 3, "all run")
    first, second, third = sorted(names(cluster, "app=idle"))
    for name, cost in ((first, "5"), (second, "-1"), (third, "3")):
        annotations = {"controller.kubernetes.io/pod-deletion-cost": cost}
        metadata = {"annotations": annotations, "labels": {"priced": "yes"}}
        cluster.patch("Pod", name, {"metadata": metadata})
    # Who writes the slice has seen the prices too.
    cluster.apply([service("priced", selector={"priced": "yes"})])
    cluster.until(lambda: len(endpoints(cluster, "priced")) == 3, "the prices are known")
    cluster.patch("Deployment", "idle", {"spec": {"replicas": 2}})
    cluster.until(lambda: names(cluster, "app=idle") == {first, third}, "the cheapest went")
    cluster.patch("Deployment", "idle", {"spec": {"replicas": 0}})
    cluster.until(lambda: not cluster.pods("app=idle"), "all went")


def test_a_deleted_pod_of_a_deployment_is_replaced(cluster: Cluster, workload: Make) -> None:
    cluster.apply([workload("Deployment", "idle", IDLE)])
    cluster.until(lambda: cluster.ready("app=idle") == 1, "it runs")
    [old] = names(cluster, "app=idle")
    cluster.delete("Pod", old)
    cluster.until(lambda: cluster.ready("app=idle") == 1, "another runs")
    assert old not in names(cluster, "app=idle")
    cluster.delete("Deployment", "idle")
    cluster.until(lambda: not cluster.pods("app=idle"), "its pods went with it")


def test_a_stateful_set_keeps_names_and_volumes(
    cluster: Cluster, workload: Make, service: Make
) -> None:
    claim = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    code = "open('/data/lives', 'a').write('x')\n" + IDLE
    more = {"replicas": 2, "volumeClaimTemplates": [claim]}
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    headless = service("db", clusterIP="None")
    cluster.apply([workload("StatefulSet", "db", code, container=mounts, more=more), headless])
    cluster.until(lambda: cluster.ready("app=db") == 2, "both run")
    assert names(cluster, "app=db") == {"db-0", "db-1"}
    cluster.until(
        lambda: cluster.execute("db-0", ["getent", "hosts", "db-1.db"])[0] == 0,
        "one resolves the other",
    )
    for name in ("db-0", "db-1"):
        seen = functools.partial(cluster.execute, name, ["cat", "/data/lives"])
        cluster.until(lambda s=seen: s() == (0, "x"), f"{name} wrote")
    uid = cluster.pods("app=db")[0]["metadata"]["uid"]
    cluster.delete("Pod", "db-0")
    cluster.until(lambda: cluster.pods("app=db")[0]["metadata"]["uid"] != uid, "it is replaced")
    cluster.until(lambda: cluster.ready("app=db") == 2, "it runs again")
    for name, lives in (("db-0", "xx"), ("db-1", "x")):
        seen = functools.partial(cluster.execute, name, ["cat", "/data/lives"])
        cluster.until(lambda s=seen, w=lives: s() == (0, w), f"{name} wrote {lives}")


def conditions_of(cluster: Cluster, job: str) -> dict[str, str]:
    found = cluster.get("Job", job) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return {c["type"]: c.get("reason", "") for c in conditions if c["status"] == "True"}


def test_pods_of_an_indexed_job_find_each_other(
    cluster: Cluster, workload: Make, service: Make
) -> None:
    code = """
import os, socket, time
index, other = int(os.environ["JOB_COMPLETION_INDEX"]), 1 - int(os.environ["JOB_COMPLETION_INDEX"])
assert os.environ["RANK"] == str(index) and socket.gethostname() == f"pair-{index}"
server = socket.create_server(("", 8080))
while True:
    try:
        socket.create_connection((f"pair-{other}.ring", 8080), timeout=5).close()
        break
    except OSError:
        time.sleep(0.1)
server.accept()
"""
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    rank = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    ring = service("ring", clusterIP="None", publishNotReadyAddresses=True)
    ring["spec"]["selector"] = {"app": "pair"}
    more = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0}
    job = workload(
        *("Job", "pair", code),
        container={"env": [rank]},
        subdomain="ring",
        restartPolicy="Never",
        more=more,
    )
    cluster.apply([ring, job])
    cluster.until(lambda: "Complete" in conditions_of(cluster, "pair"), "the job is complete")
    status = (cluster.get("Job", "pair") or {})["status"]
    assert (status["succeeded"], status["completedIndexes"]) == (2, "0,1")


def test_a_failing_job_fails(cluster: Cluster, workload: Make) -> None:
    more = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0}
    code = (
        "import os, signal\nif os.environ['JOB_COMPLETION_INDEX'] == '0': raise ValueError('x')\n"
    )
    job = workload("Job", "fails", code + IDLE, restartPolicy="Never", more=more)
    cluster.apply([job])
    cluster.until(lambda: conditions_of(cluster, "fails"), "the job ends")
    assert conditions_of(cluster, "fails") == {"Failed": "BackoffLimitExceeded"}
    cluster.until(lambda: len(names(cluster, "app=fails")) == 1, "the other was stopped")
    [failed] = names(cluster, "app=fails")
    assert "ValueError: x" in cluster.logs(failed)


def test_a_job_tries_again_within_its_limit(cluster: Cluster, workload: Make) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "memory"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    code = (
        "import os; os.mkdir('/memory/a') if not os.path.exists('/memory/a') else exit(); exit(1)"
    )
    job = workload(
        *("Job", "twice", code),
        container={"volumeMounts": [{"name": "memory", "mountPath": "/memory"}]},
        volumes=[{"name": "memory", "persistentVolumeClaim": {"claimName": "memory"}}],
        restartPolicy="Never",
        more={"backoffLimit": 1},
    )
    cluster.apply([claim, job])
    cluster.until(lambda: "Complete" in conditions_of(cluster, "twice"), "the second try succeeds")
    assert (cluster.get("Job", "twice") or {})["status"]["failed"] == 1
    cluster.patch("Job", "twice", {"spec": {"ttlSecondsAfterFinished": 1}})
    cluster.until(lambda: cluster.get("Job", "twice") is None, "its time to live passes")


def test_a_cron_job_runs_on_request(cluster: Cluster, workload: Make) -> None:
    job = workload("Job", "x", "print('now')", restartPolicy="Never")
    cron = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "daily"},
        "spec": {"schedule": "0 0 * * *", "jobTemplate": {"spec": job["spec"]}},
    }
    cluster.apply([cron])
    name = cluster.run_cron_job("daily")
    cluster.until(lambda: "Complete" in conditions_of(cluster, name), "it runs")


def test_ten_pods_start_concurrently(cluster: Cluster, workload: Make) -> None:
    code = {"command": ["sleep", "1000"]}
    cluster.apply([workload("Deployment", "many", "", container=code, more={"replicas": 10})])
    cluster.until(lambda: cluster.ready("app=many") == 10, "all run")
