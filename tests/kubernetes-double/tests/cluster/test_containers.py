"""A container's environment, files, host names and user."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes_double import Cluster

Object = dict[str, Any]
Make = Callable[..., Object]
PRINT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
IDLE = "import signal; signal.pause()"


def config(kind: str, name: str, **data: str) -> Object:
    field = "stringData" if kind == "Secret" else "data"
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, field: data}


def test_environment_and_arguments(
    cluster: Cluster, pod: Make, finished: Callable[[str], str]
) -> None:
    def field(path: str) -> Object:
        return {"fieldRef": {"fieldPath": path}}

    env = [
        {"name": "POD_NAME", "valueFrom": field("metadata.name")},
        {"name": "POD_IP", "valueFrom": field("status.podIP")},
        {"name": "NODE", "valueFrom": field("spec.nodeName")},
        {"name": "APP", "valueFrom": field("metadata.labels['app']")},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}},
        {
            "name": "NONE",
            "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no", "optional": True}},
        },
        {"name": "URL", "value": "http://$(POD_NAME):$(PORT)/$$(POD_NAME)/$(UNKNOWN)"},
    ]
    container = {
        "args": ["--name=$(POD_NAME)", "$(URL)"],
        "env": env,
        "envFrom": [{"configMapRef": {"name": "c"}}, {"prefix": "S_", "secretRef": {"name": "s"}}],
    }
    made = pod("shows", PRINT, container=container, restartPolicy="Never")
    cluster.apply([config("Secret", "s", password="p"), config("ConfigMap", "c", PORT="1"), made])
    assert finished("shows") == "Succeeded"
    arguments, seen = json.loads(cluster.logs("shows"))
    status = (cluster.get("Pod", "shows") or {})["status"]
    assert arguments == ["--name=shows", "http://shows:1/$(POD_NAME)/$(UNKNOWN)"]
    assert seen["POD_IP"] == status["podIP"]
    assert seen["NODE"] in ("plain-a", "plain-b")
    assert (seen["APP"], seen["PASSWORD"], seen["S_password"]) == ("shows", "p", "p")
    assert "NONE" not in seen
    assert seen["HOSTNAME"] == "shows"


def test_files_of_secrets_and_config_maps(cluster: Cluster, pod: Make) -> None:
    item = {"key": "b", "path": "deep/b.txt", "mode": 0o400}
    token = {"serviceAccountToken": {"path": "token", "audience": "store"}}
    labels = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}
    volumes = [
        {"name": "whole", "secret": {"secretName": "s", "defaultMode": 0o440}},
        {"name": "some", "configMap": {"name": "c", "items": [item]}},
        {
            "name": "many",
            "projected": {
                "sources": [
                    token,
                    {"configMap": {"name": "c"}},
                    {"downwardAPI": {"items": [labels]}},
                ]
            },
        },
    ]
    mounts = [
        {"name": "whole", "mountPath": "/etc/program/secrets"},
        {"name": "some", "mountPath": "/etc/program/some"},
        {"name": "many", "mountPath": "/many"},
        {"name": "whole", "mountPath": "/etc/program/one.yaml", "subPath": "x"},
    ]
    made = pod("reads", IDLE, container={"volumeMounts": mounts}, volumes=volumes)
    cluster.apply([config("Secret", "s", x="1"), config("ConfigMap", "c", a="A", b="B"), made])
    cluster.until(lambda: cluster.ready("app=reads"), "the pod runs")
    shown = "cat secrets/x some/deep/b.txt one.yaml /many/a /many/labels; test -s /many/token"
    code, text = cluster.execute("reads", ["sh", "-c", f"cd /etc/program && {shown}"])
    assert (code, text) == (0, '1B1Aapp="reads"\n')
    modes = "stat -L -c %a secrets/x some/deep/b.txt /many/a"
    assert cluster.execute("reads", ["sh", "-c", f"cd /etc/program && {modes}"])[1].split() == [
        "440",
        "400",
        "644",
    ]
    code, text = cluster.execute("reads", ["touch", "/etc/program/secrets/y"])
    assert code != 0
    assert "Read-only file system" in text
    assert not Path("/etc/program").exists(), "mount points belong to the container alone"


def test_a_changed_config_map_appears_atomically(cluster: Cluster, pod: Make) -> None:
    mounts = [{"name": "c", "mountPath": "/c"}]
    volumes = [{"name": "c", "configMap": {"name": "c"}}]
    code = """
import pathlib, time
said = ""
while True:
    try:
        folder = pathlib.Path("/c/..data").resolve(strict=True)  # one look for both files
        a, b = ((folder / name).read_text() for name in "ab")
    except FileNotFoundError:
        continue
    line = f"same {a}" if a == b else f"torn {a} {b}"
    if line != said:
        print(line)
    said = line
    time.sleep(0.001)
"""
    made = pod("watches", code, container={"volumeMounts": mounts}, volumes=volumes)
    cluster.apply([config("ConfigMap", "c", a="0", b="0"), made])
    cluster.until(lambda: cluster.ready("app=watches"), "the pod runs")
    for number in range(1, 6):
        cluster.apply([config("ConfigMap", "c", a=str(number), b=str(number))])
        wanted = f"same {number}"
        cluster.until(lambda w=wanted: w in cluster.logs("watches"), wanted)
    assert "torn" not in cluster.logs("watches")


def test_a_pod_waits_for_what_it_mounts(cluster: Cluster, pod: Make) -> None:
    volumes = [{"name": "s", "secret": {"secretName": "late"}}]
    container = {"volumeMounts": [{"name": "s", "mountPath": "/s"}]}
    cluster.apply([pod("waits", IDLE, container=container, volumes=volumes)])

    def reason() -> str:
        conditions = (cluster.get("Pod", "waits") or {})["status"].get("conditions", [])
        return " ".join(c.get("message", "") for c in conditions)

    cluster.until(lambda: "secret 'late' not found" in reason(), "it says what is missing")
    cluster.apply([config("Secret", "late", x="1")])
    cluster.until(lambda: cluster.ready("app=waits"), "it runs")
    assert cluster.execute("waits", ["cat", "/s/x"]) == (0, "1")


def test_a_read_only_root_and_a_user(cluster: Cluster, pod: Make) -> None:
    security = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "data", "mountPath": "/var/lib/program"},
    ]
    volumes = [{"name": name, "emptyDir": {}} for name in ("tmp", "data")]
    made = pod(
        *("closed", IDLE),
        container={"volumeMounts": mounts, "securityContext": security},
        volumes=volumes,
        securityContext={"runAsUser": 4321, "runAsGroup": 4322, "fsGroup": 4323},
    )
    cluster.apply([made])
    cluster.until(lambda: cluster.ready("app=closed"), "the pod runs")
    tried = "for f in /x /etc/x /var/x /run/x /usr/x; do touch $f 2>/dev/null && echo $f; done"
    assert cluster.execute("closed", ["sh", "-c", tried])[1] == ""
    allowed = "touch /tmp/x /var/lib/program/x /dev/shm/x && stat -c %g /var/lib/program"
    assert cluster.execute("closed", ["sh", "-c", allowed]) == (0, "4323\n")
    assert cluster.execute("closed", ["id", "-u"])[1] in ("4321\n", "0\n")
    assert cluster.execute("closed", ["sh", "-c", "grep NoNewPrivs /proc/1/status"])[1].endswith(
        "1\n"
    )


def test_containers_of_a_pod_share_network_and_volumes_but_no_root(
    cluster: Cluster, pod: Make, finished: Callable[[str], str]
) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    first = {
        "name": "first",
        "image": "test",
        "command": ["sh", "-c", "echo first >> /shared/order; touch /only-here"],
        "volumeMounts": mounts,
    }
    server = {
        "name": "server",
        "image": "test",
        "command": ["python", "-m", "http.server", "8080"],
        "workingDir": "/shared",
        "volumeMounts": mounts,
    }
    code = """
import os, time, urllib.request
while True:
    try:
        told = urllib.request.urlopen("http://127.0.0.1:8080/order").read()
        print(told, os.path.exists("/only-here"))
        break
    except OSError:
        time.sleep(0.1)
time.sleep(100)
"""
    made = pod("pair", code, initContainers=[first], volumes=[{"name": "shared", "emptyDir": {}}])
    made["spec"]["containers"].append(server)
    cluster.apply([made])
    wanted = "b'first\\n' False\n"
    cluster.until(lambda: cluster.ready("app=pair"), "both run")
    cluster.until(lambda: cluster.logs("pair", "main") == wanted, "one reads from the other")


def test_a_failed_init_container_fails_the_pod(
    cluster: Cluster, pod: Make, finished: Callable[[str], str]
) -> None:
    first = {"name": "first", "image": "test", "command": ["sh", "-c", "exit 7"]}
    cluster.apply([pod("never", IDLE, initContainers=[first], restartPolicy="Never")])
    assert finished("never") == "Failed"
    status = (cluster.get("Pod", "never") or {})["status"]
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 7
    assert "waiting" in status["containerStatuses"][0]["state"]


def test_pods_reach_the_server_with_their_own_account(cluster: Cluster, pod: Make) -> None:
    code = """
import kubernetes
kubernetes.config.load_incluster_config()
api = kubernetes.client.AuthenticationV1Api()
body = kubernetes.client.V1SelfSubjectReview()
print(api.create_self_subject_review(body).status.user_info.username)
"""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot"}}
    cluster.apply([account, pod("asks", code, serviceAccountName="robot", restartPolicy="Never")])
    user = f"system:serviceaccount:{cluster.namespace}:robot"
    cluster.until(lambda: user in logs(cluster, "asks"), "it knows who it is")


def test_the_store_is_found_by_its_image(cluster: Cluster, pod: Make) -> None:
    command = ["valkey-server", "--bind", "0.0.0.0", "--port", "6379", "--save", ""]
    container = {
        "image": "valkey/valkey:8",
        "command": command,
        "readinessProbe": {"tcpSocket": {"port": 6379}},
    }
    cluster.apply([pod("store", "", container=container)])
    cluster.until(lambda: cluster.ready("app=store"), "the store answers")


def logs(cluster: Cluster, name: str) -> str:
    found = cluster.get("Pod", name) or {}
    phase = found.get("status", {}).get("phase", "Pending")
    return "" if phase == "Pending" else cluster.logs(name)
