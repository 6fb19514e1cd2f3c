"""An API server with a ServiceAccount that has exactly the rights of the issuer's role."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from kubernetes_double.api import ApiServer, Visit
from paceline_controller.certificates.config import Issue
from paceline_controller.certificates.content import parse_authority, parse_leaf
from paceline_controller.certificates.issue import Authority, Issued
from paceline_controller.certificates.run import run
from paceline_controller.certificates.secrets import Secrets

NAMESPACE = "training"
ACCOUNT = "issuer"
SERVICES = {
    "gateway": {"secret": "p-tls-gateway", "names": ["p-gateway", "p-gateway.training.svc"]},
    "experience": {"secret": "p-tls-experience", "names": ["p-experience"]},
    "rollout": {"secret": "p-tls-rollout"},
}
AUTHORITY = "p-tls-authority"
NAMES = [AUTHORITY, *(str(leaf["secret"]) for leaf in SERVICES.values())]
RULES: list[dict[str, Any]] = [
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {
        "apiGroups": [""],
        "resources": ["secrets"],
        "resourceNames": NAMES,
        "verbs": ["get", "patch", "update"],
    },
]


@dataclass
class Installation:
    """One namespace with its issuer, from an administrator's view."""

    server: ApiServer
    kubeconfig: Path
    core: Any
    rbac: Any

    def issue(self, **fields: Any) -> Issue:
        content: dict[str, Any] = {
            "namespace": NAMESPACE,
            "authority": AUTHORITY,
            "services": SERVICES,
            "labels": {"app.kubernetes.io/instance": "p"},
            "kubeconfig": str(self.kubeconfig),
            "timeout_s": 120,
        }
        return Issue.model_validate(content | fields)

    def run(self, now: datetime | None = None, **fields: Any) -> int:
        """Run the issuer once; returns the number of Secrets written."""
        issue = self.issue(**fields)
        moment = now or datetime.now(UTC)
        return run(issue, Secrets.connect(issue), now=lambda: moment)

    def secret(self, name: str) -> Any:
        return self.core.read_namespaced_secret(name, NAMESPACE)

    def data(self, name: str) -> dict[str, bytes]:
        found: Mapping[str, str] = self.secret(name).data or {}
        return {key: b64decode(value) for key, value in found.items()}

    def authority(self) -> Authority:
        found = parse_authority(self.data(AUTHORITY))
        assert found is not None
        return found

    def leaf(self, service: str) -> Issued:
        found = parse_leaf(self.data(str(SERVICES[service]["secret"])))
        assert found is not None
        return found

    def lose(self, name: str) -> None:
        self.core.delete_namespaced_secret(name, NAMESPACE)

    def allow(self, rules: list[dict[str, Any]]) -> None:
        """Replace the rules of the issuer's role."""
        role = {"metadata": {"name": ACCOUNT}, "rules": rules}
        self.rbac.replace_namespaced_role(ACCOUNT, NAMESPACE, role)

    def visits(self) -> list[Visit]:
        """The issuer's API requests."""
        return self.server.visits_of(f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}")


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with ApiServer(folder=tmp_path / "cluster") as server:
        settings: Any = client.Configuration()
        config.load_kube_config(str(server.kubeconfig), client_configuration=settings)
        api = client.ApiClient(settings)
        core: Any = client.CoreV1Api(api)
        rbac: Any = client.RbacAuthorizationV1Api(api)
        core.create_namespace({"metadata": {"name": NAMESPACE}})
        core.create_namespaced_service_account(NAMESPACE, {"metadata": {"name": ACCOUNT}})
        rbac.create_namespaced_role(NAMESPACE, {"metadata": {"name": ACCOUNT}, "rules": RULES})
        binding = {
            "metadata": {"name": ACCOUNT},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": ACCOUNT,
            },
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
        }
        rbac.create_namespaced_role_binding(NAMESPACE, binding)
        yield Installation(server, server.kubeconfig_for(NAMESPACE, ACCOUNT), core, rbac)


@pytest.fixture
def rules() -> Callable[[], list[dict[str, Any]]]:
    """The rules of the issuer's role."""
    return lambda: [dict(rule) for rule in RULES]
