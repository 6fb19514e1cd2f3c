"""The issuer against an API server that evaluates its role."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store
from kubernetes import client, config

from paceline.errors import PermissionDeniedError, StateError, UnavailableError
from paceline_controller.certificates.config import DOMAIN
from paceline_controller.certificates.pair import names_of
from paceline_controller.certificates.run import run
from paceline_controller.certificates.secrets import Secrets
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Installation

SERVICES = ("gateway", "experience", "rollout")
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def check_trust(installation: Installation, now: datetime = NOW) -> None:
    """Everyone accepts everyone, at both ends of a connection."""
    leaves = [installation.leaf(service) for service in SERVICES]
    for mine in leaves:
        builder = PolicyBuilder().store(Store(list(mine.bundle))).time(now)
        for other in leaves:
            certificate = other.pair.certificate
            builder.build_client_verifier().verify(certificate, [])
            builder.build_server_verifier(x509.DNSName(DOMAIN)).verify(certificate, [])


def verbs(installation: Installation, since: int = 0) -> list[str]:
    return [visit.access.verb for visit in installation.visits()[since:]]


def test_a_second_run_changes_nothing(installation: Installation) -> None:
    assert installation.run(NOW) == 4
    check_trust(installation)
    assert "p-gateway.training.svc" in names_of(installation.leaf("gateway").pair.certificate)
    secret = installation.secret("p-tls-gateway")
    assert secret.type == "kubernetes.io/tls"
    assert secret.metadata.labels == {
        "app.kubernetes.io/instance": "p",
        "app.kubernetes.io/managed-by": "paceline-certificates",
    }
    before = len(installation.visits())
    assert installation.run(NOW + DAY) == 0
    assert verbs(installation, before) == ["get"] * 4
    assert all(visit.allowed for visit in installation.visits())


def test_the_key_of_the_authority_is_in_its_secret_only(installation: Installation) -> None:
    installation.run(NOW)
    key = installation.authority().active.key_pem
    for service in SERVICES:
        data = installation.data(f"p-tls-{service}")
        assert set(data) == {"tls.crt", "tls.key", "ca.crt"}
        assert key not in data.values()


def test_a_rotation_from_run_to_run(installation: Installation) -> None:
    """Daily runs for a year: certificates and authorities rotate, and all peers stay trusted."""
    life = {"days": 30, "authority_days": 120}
    authorities: set[x509.Certificate] = set()
    leaves: set[x509.Certificate] = set()
    for day in range(0, 200, 2):
        now = NOW + day * DAY
        installation.run(now, **life)
        check_trust(installation, now)
        authorities.add(installation.authority().active.certificate)
        leaves.add(installation.leaf("rollout").pair.certificate)
    assert len(authorities) == 3
    assert len(leaves) == 10
    assert set(verbs(installation)) == {"get", "create", "update"}
    assert all(visit.allowed for visit in installation.visits())


def test_concurrent_runs_agree(installation: Installation) -> None:
    """Concurrent issuers learn of each other's writes only through conflicts."""
    for moment in (NOW, NOW + 61 * DAY, NOW + 2500 * DAY, NOW + 2502 * DAY):
        with ThreadPoolExecutor(6) as pool:
            runs = [pool.submit(installation.run, moment) for _ in range(6)]
        assert all(each.result() >= 0 for each in runs)
        check_trust(installation, moment)
        assert installation.run(moment) == 0
    assert all(visit.allowed for visit in installation.visits())


class Breaks:
    """An API client whose process dies just before or after its n-th write."""

    def __init__(self, api: Any, at: int, *, after: bool) -> None:
        self._api = api
        self._left = at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        if not name.startswith(("create", "replace")):
            return method

        def write(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left > 0:
                return method(*args, **kwargs)
            if self._after:
                method(*args, **kwargs)
            raise KeyboardInterrupt

        return write


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", range(1, 6))
def test_a_run_may_die_anywhere(installation: Installation, write: int, after: bool) -> None:
    """At any of the five writes of a new authority; the next run continues from there."""
    life: dict[str, Any] = {"days": 90, "authority_days": 180}
    for day in (0, 62, 118):
        installation.run(NOW + day * DAY, **life)
    assert installation.authority().next is None
    now = NOW + 121 * DAY
    issue = installation.issue(**life)
    settings: Any = client.Configuration()
    config.load_kube_config(issue.kubeconfig, client_configuration=settings)
    breaks = Breaks(client.CoreV1Api(client.ApiClient(settings)), write, after=after)
    with pytest.raises(KeyboardInterrupt):
        run(issue, Secrets(breaks, issue), now=lambda: now)
    check_trust(installation, now)
    left = 5 - write + (0 if after else 1)
    assert installation.run(now, **life) == left
    assert installation.authority().spread_since == now
    check_trust(installation, now)
    installation.run(now + DAY, **life)
    assert installation.authority().next is None
    check_trust(installation, now + DAY)


@pytest.mark.parametrize("verb", ["create", "get", "update"])
def test_what_the_role_lacks_is_named(
    installation: Installation, rules: Callable[[], list[dict[str, Any]]], verb: str
) -> None:
    if verb == "update":
        installation.run(NOW)
    installation.allow([{**r, "verbs": [v for v in r["verbs"] if v != verb]} for r in rules()])
    with pytest.raises(PermissionDeniedError, match=f"{verb} secret training/p-tls-.*: 403"):
        installation.run(NOW + 80 * DAY)


def test_secrets_of_others_are_left_alone(installation: Installation) -> None:
    body = {"metadata": {"name": "p-tls-rollout"}, "stringData": {"mine": "yes"}}
    installation.core.create_namespaced_secret("training", body)
    with pytest.raises(StateError, match="secret training/p-tls-rollout was not made by the issu"):
        installation.run(NOW)
    assert installation.data("p-tls-rollout") == {"mine": b"yes"}
    assert set(verbs(installation)) == {"get"}


def test_what_was_lost_or_spoilt_is_made_again(installation: Installation) -> None:
    installation.run(NOW)
    authority = installation.authority().active.certificate
    installation.lose("p-tls-gateway")
    body = {"data": {"tls.crt": "bm9uc2Vuc2U="}}
    installation.core.patch_namespaced_secret("p-tls-rollout", "training", body)
    assert installation.run(NOW) == 2
    check_trust(installation)
    assert installation.authority().active.certificate == authority
    installation.lose("p-tls-authority")
    assert installation.run(NOW) == 4
    check_trust(installation)
    assert installation.authority().active.certificate != authority


def test_labels_and_owner_follow_the_file(installation: Installation) -> None:
    installation.run(NOW)
    owner = installation.core.create_namespaced_config_map(
        "training", {"metadata": {"name": "release"}}
    )
    reference = {"api_version": "v1", "kind": "ConfigMap", "name": "release"}
    fields = {
        "labels": {"app.kubernetes.io/instance": "q"},
        "owner": {**reference, "uid": owner.metadata.uid},
    }
    assert installation.run(NOW, **fields) == 4
    assert installation.run(NOW, **fields) == 0
    metadata = installation.secret("p-tls-gateway").metadata
    assert metadata.labels["app.kubernetes.io/instance"] == "q"
    assert metadata.owner_references[0].uid == owner.metadata.uid


class LateClock:
    """Time passes while a run sleeps, for longer than requested."""

    def __init__(self, late_s: float) -> None:
        self.now_s = 0.0
        self._late_s = late_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s + self._late_s


@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_a_server_that_is_away_is_waited_for_until_the_deadline(
    installation: Installation, tmp_path: Path, late_s: float
) -> None:
    issue = installation.issue(timeout_s=2.0)
    content = yaml.safe_load(Path(issue.kubeconfig).read_text())
    content["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    away = tmp_path / "away.yaml"
    away.write_text(yaml.safe_dump(content))
    settings: Any = client.Configuration()
    settings.retries = False
    config.load_kube_config(str(away), client_configuration=settings)
    clock = LateClock(late_s)
    secrets = Secrets(
        client.CoreV1Api(client.ApiClient(settings)), issue, clock=lambda: clock.now_s
    )
    with pytest.raises(UnavailableError, match="get secret training/p-tls-authority"):
        run(issue, secrets, sleep=clock.sleep)
    assert clock.now_s > 0.5, "it did not wait"


def test_as_a_process(installation: Installation, tmp_path: Path) -> None:
    path = tmp_path / "issue.yaml"
    issue = installation.issue().model_dump(mode="json") | {"namespace": "elsewhere"}
    path.write_text(yaml.safe_dump(issue))
    command = [sys.executable, "-m", "paceline_controller.certificates", str(path)]
    command += ["--set", "namespace=training"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert "issued service=gateway" in ended.stderr
    assert "PRIVATE" not in ended.stderr + ended.stdout
    check_trust(installation, datetime.now(UTC))
    ended = subprocess.run(command[:-2], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "get secret elsewhere/p-tls-authority: 403" in ended.stderr
