"""Access control: verbs of roles, the restricted standard on every pod, location of secrets."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.platform.transport.principal import derived_token

FEATURES = sorted(
    path.name.removesuffix("-values.yaml")
    for path in (Path(__file__).resolve().parents[2] / "deploy/helm/paceline/ci").iterdir()
)
# Group/resource -> verbs; with =NAME those on one object only. That the controller needs each of
# them, and nothing else, is shown by tests/integration/controller_kubernetes/test_access.py.
CONTROLLER = {
    "apps/deployments": "get list watch create patch delete",
    "batch/jobs": "list watch create patch delete",
    "/secrets": "create patch delete",
    "/services": "create patch delete",
    "networking.k8s.io/networkpolicies": "create patch delete",
    "/pods": "list watch patch delete",
    "/pods/log": "get",
    "events.k8s.io/events": "list watch create patch",
    "coordination.k8s.io/leases": "create",
    "coordination.k8s.io/leases=rel-paceline-controller": "get update",
}
TRAINING_JOBS = {
    "paceline.dev/trainingjobs": "list watch patch delete",
    "paceline.dev/trainingjobs/status": "patch",
}
JOBSET = {"jobset.x-k8s.io/jobsets": "list watch create patch delete"}
SERVICES = ("controller", "environment", "experience", "gateway", "reward", "rollout", "trainer")
ISSUER = {"/secrets": "create"} | {
    f"/secrets=rel-paceline-tls-{name}": "get update" for name in (*SERVICES, "authority")
}

Object = dict[str, Any]
Render = Callable[..., list[Object]]


def granted(objects: list[Object], role: str) -> dict[str, set[str]]:
    roles = [o for o in objects if o["kind"] == "Role" and o["metadata"]["name"] == role]
    # Those of the end take the names of what is to be deleted, and allow nothing.
    (found,) = (one for one in roles if one["rules"])
    rights: dict[str, set[str]] = {}
    for rule in found["rules"]:
        assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    key = f"{group}/{resource}" + (f"={name}" if name else "")
                    rights.setdefault(key, set()).update(rule["verbs"])
    return rights


def verbs(table: dict[str, str]) -> dict[str, set[str]]:
    return {key: set(text.split()) for key, text in table.items()}


def test_controller_may_do_what_it_does(render: Render) -> None:
    name = "rel-paceline-controller"
    assert granted(render(), name) == verbs(CONTROLLER | TRAINING_JOBS)
    assert granted(render("jobset"), name) == verbs(CONTROLLER | JOBSET)
    without = set(CONTROLLER) - {"networking.k8s.io/networkpolicies"}
    assert set(granted(render("network-policy-off"), name)) == without | set(TRAINING_JOBS)


@pytest.mark.parametrize("role", ["rel-paceline-certificates", "rel-paceline-certificates-hook"])
def test_issuer_may_write_the_secrets_that_it_issues(role: str, render: Render) -> None:
    assert granted(render(), role) == verbs(ISSUER)


@pytest.mark.parametrize("feature", ["cert-manager", "no-tls"])
def test_without_the_builtin_issuer_only_the_controller_has_a_role(
    feature: str, render: Render
) -> None:
    roles = {o["metadata"]["name"] for o in render(feature) if o["kind"] == "Role"}
    assert roles == {"rel-paceline-controller"}


@pytest.mark.parametrize("feature", FEATURES)
def test_roles_belong_to_the_namespace_and_to_one_account(feature: str, render: Render) -> None:
    objects = render(feature)
    assert not {"ClusterRole", "ClusterRoleBinding"} & {o["kind"] for o in objects}
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    roles = {o["metadata"]["name"] for o in objects if o["kind"] == "Role"}
    bound: set[str] = set()
    for binding in (o for o in objects if o["kind"] == "RoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["namespace"] == binding["metadata"]["namespace"] == "training"
        assert subject["name"] == binding["roleRef"]["name"] == binding["metadata"]["name"]
        assert subject["name"] in accounts
        bound.add(binding["roleRef"]["name"])
    assert bound == roles


@pytest.mark.parametrize("feature", FEATURES)
def test_only_controller_and_issuer_hold_a_token_of_the_api(
    feature: str, render: Render, pods: Any
) -> None:
    objects = render(feature)
    for one in objects:
        if one["kind"] == "ServiceAccount":
            assert one["automountServiceAccountToken"] is False
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    for name, template in pods(objects).items():
        spec = template["spec"]
        may = name.endswith("-controller") or "-certificates" in name
        assert spec["automountServiceAccountToken"] is may, name
        assert spec["serviceAccountName"] in accounts, name


def violations(template: Object) -> list[str]:
    """Violations of the Pod Security Standard `restricted` (including `baseline`) in a pod."""
    spec, security = template["spec"], template["spec"].get("securityContext", {})
    found = [f for f in ("hostNetwork", "hostPID", "hostIPC") if spec.get(f)]
    found += [f"pod: {problem}" for problem in common(security)]
    found += [f"{k}" for k in ("sysctls", "windowsOptions") if security.get(k)]
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"}
    kinds |= {"persistentVolumeClaim", "projected", "secret"}
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}: {kind}" for kind in set(volume) - {"name"} - kinds]
    annotations = template["metadata"].get("annotations", {})
    found += [key for key in annotations if "apparmor" in key]
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            found += [f"{container['name']}: {p}" for p in in_container(container, security)]
    return found


def common(security: Object) -> list[str]:
    found: list[str] = []
    if security.get("runAsUser") == 0:
        found.append("runAsUser 0")
    if security.get("runAsNonRoot") is False:
        found.append("runAsNonRoot false")
    if security.get("seccompProfile", {}).get("type") == "Unconfined":
        found.append("seccompProfile Unconfined")
    if set(security.get("seLinuxOptions", {})) & {"user", "role"}:
        found.append("seLinuxOptions")
    if security.get("appArmorProfile", {}).get("type") == "Unconfined":
        found.append("appArmorProfile Unconfined")
    return found


def in_container(container: Object, pod: Object) -> list[str]:
    security = container.get("securityContext", {})
    found = common(security)
    if security.get("privileged"):
        found.append("privileged")
    if security.get("allowPrivilegeEscalation") is not False:
        found.append("allowPrivilegeEscalation")
    if security.get("procMount", "Default") != "Default":
        found.append("procMount")
    capabilities = security.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        found.append("capabilities are not dropped")
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        found.append("capabilities are added")
    if security.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        found.append("runAsNonRoot")
    seccomp = security.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
    if seccomp not in {"RuntimeDefault", "Localhost"}:
        found.append("seccompProfile")
    found += [f"hostPort {p['hostPort']}" for p in container.get("ports", []) if "hostPort" in p]
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_every_pod_keeps_to_the_restricted_standard(
    feature: str, render: Render, pods: Any
) -> None:
    templates = pods(render(feature))
    assert len(templates) >= 7
    for name, template in templates.items():
        assert violations(template) == [], name
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_the_check_of_the_standard_sees_what_is_wrong(render: Render, pods: Any) -> None:
    template = pods(render())["Deployment/rel-paceline-gateway"]
    wrong: list[Callable[[Object], Any]] = [
        lambda pod: pod["spec"].update(hostNetwork=True),
        lambda pod: pod["spec"].update(securityContext={}),
        lambda pod: pod["spec"]["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
        lambda pod: pod["spec"]["containers"][0].update(securityContext={}),
        lambda pod: pod["spec"]["containers"][0]["securityContext"].update(runAsUser=0),
        lambda pod: pod["spec"]["containers"].append({"name": "side"}),
        lambda pod: pod["spec"]["containers"][0]["ports"].append({"hostPort": 80}),
    ]
    for spoil in wrong:
        copy = json.loads(json.dumps(template))
        spoil(copy)
        assert violations(copy)


def secret_values(objects: list[Object]) -> set[str]:
    """Tokens and passwords in the Secrets of the release."""
    found: set[str] = set()
    for one in objects:
        for key, value in one.get("data", {}).items() if one["kind"] == "Secret" else ():
            text = base64.b64decode(value).decode()
            if key in {"token", "password"}:
                found.add(text)
            elif key == "controller.yaml":
                found.add(yaml.safe_load(text)["token"])
            elif key == "store.yaml":
                found.add(text.partition("://")[2].rpartition("@")[0].partition(":")[2])
    return found - {""}


@pytest.mark.parametrize("feature", FEATURES)
def test_secrets_are_in_secrets_only(feature: str, render: Render) -> None:
    objects = render(feature)
    secrets = secret_values(objects)
    if feature != "existing-secrets":
        # A store of others has no password here, or it is in a Secret of theirs.
        assert len(secrets) >= (1 if feature in {"external-store", "external-cluster"} else 2)
    elsewhere = json.dumps([one for one in objects if one["kind"] != "Secret"])
    for value in secrets:
        assert value not in elsewhere
    # Nothing that begins with the name of a section is taken from the environment either.
    assert "secretKeyRef" not in elsewhere


@pytest.mark.parametrize(
    ("secret", "readers"),
    [
        ("rel-paceline-token", {"gateway": "token.yaml", "controller": "controller.yaml"}),
        ("rel-paceline-store", {"experience": "store.yaml", "store": "password.conf"}),
    ],
)
def test_secrets_are_mounted_where_they_are_read(
    secret: str, readers: dict[str, str], render: Render, pods: Any
) -> None:
    found: dict[str, str] = {}
    for template in pods(render()).values():
        for volume in template["spec"]["volumes"]:
            if volume.get("secret", {}).get("secretName") == secret:
                (item,) = volume["secret"]["items"]
                reader = template["metadata"]["labels"]["app.kubernetes.io/component"]
                assert found.setdefault(reader, item["key"]) == item["key"]
    assert found == readers


def test_the_controllers_token_is_the_one_that_the_gateway_knows(render: Render) -> None:
    (secret,) = (o for o in render() if o["metadata"]["name"] == "rel-paceline-token")
    data = {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
    tokens = {key: yaml.safe_load(data[key])["token"] for key in ("token.yaml", "controller.yaml")}
    assert tokens["token.yaml"] == data["token"]
    assert tokens["controller.yaml"] == derived_token(data["token"], "controller")


def test_generated_secrets_differ_from_release_to_release(helm: Any, chart: Path) -> None:
    both = [helm("helm4", "template", "rel", str(chart)).stdout for _ in range(2)]
    tokens = [line for text in both for line in text.splitlines() if line.startswith("  token: ")]
    assert len(tokens) == 2
    assert tokens[0] != tokens[1]
    assert all(len(base64.b64decode(line.split()[1])) == 61 for line in tokens)
