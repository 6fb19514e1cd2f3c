"""The services accept the settings in their pods."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import ServiceSettings
from paceline.config.load import validate
from paceline.config.service import (
    ControllerOptions,
    EnvironmentOptions,
    ExperienceOptions,
    GatewayOptions,
    RewardOptions,
    RolloutOptions,
    TrainerOptions,
)
from paceline.enums import WorkerKind
from paceline.platform.transport.service_keys import ServiceKeys, read_keys
from paceline_controller.certificates.config import Issue
from paceline_harness.installations.chart import content, settings_of_pods

FEATURES = sorted(
    path.name.removesuffix("-values.yaml")
    for path in (Path(__file__).resolve().parents[2] / "deploy/helm/paceline/ci").iterdir()
)
OPTIONS: dict[str, Any] = {
    "gateway": GatewayOptions,
    "controller": ControllerOptions,
    "experience": ExperienceOptions,
    "environment": EnvironmentOptions,
    "reward": RewardOptions,
    "rollout": RolloutOptions,
    "trainer": TrainerOptions,
}
KEYS = ServiceKeys.of_installation("0" * 64)
# Where a pod of the user's own Secrets gets them from.
OURS = {
    "our-store": {"store.yaml": "store_url: redis://:secret@ours:6390/0"},
    "our-token": {"token.yaml": "token: ours", "controller.yaml": "token: its"},
    "our-headers": {"headers": "x-api-key: ours"},
    "our-keys": {f"{kind}.json": KEYS.narrowed({kind}).dumped() for kind in WorkerKind},
    "our-authority": {"ca.crt": "-----BEGIN CERTIFICATE-----"},
}

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def started(render: Render, pods: Any, tmp_path: Path) -> Callable[..., dict[str, ServiceSettings]]:
    """Settings of each pod, loaded by the services' own code from its files."""

    def settings(feature: str, *sets: str, **environment: str) -> dict[str, ServiceSettings]:
        objects = render(feature, *sets)
        return settings_of_pods(
            objects, pods(objects), tmp_path / feature, secrets=OURS, environment=environment
        )

    return settings


@pytest.mark.parametrize("feature", FEATURES)
def test_every_pod_can_read_its_settings(feature: str, started: Any) -> None:
    found = started(feature)
    assert len(found) >= 7
    for name, settings in found.items():
        options = validate(OPTIONS[settings.kind], settings.options)
        assert settings.kind in name
        assert (settings.port, settings.metrics_port) == (8400, 8401), name
        assert settings.worker_id == "12e5"
        assert (settings.store_url != "") == (settings.kind == "experience")
        assert (settings.token != "") == (settings.kind in {"gateway", "controller"})
        assert (settings.experience == "") == (settings.kind == "experience")
        assert settings.job_id == ("42" if settings.kind in {"trainer", "rollout"} else "")
        if isinstance(options, TrainerOptions):
            assert (options.incarnation, options.weights_port) == (7, 8402)
        if isinstance(options, ControllerOptions):
            assert options.runtime == "kubernetes"
            assert options.kubernetes.namespace == "0123"
            assert options.kubernetes.identity == "12e5"


def test_command_is_the_module_of_the_service(render: Render, pods: Any) -> None:
    for name, template in pods(render()).items():
        command = template["spec"]["containers"][0]["command"]
        if command[0] == "python":
            module = command[-1]
            assert module.removeprefix("paceline_").partition(".")[0] in name or "certif" in name
    trainer = pods(render())["template/trainer.yaml"]["spec"]["containers"][0]["command"]
    assert trainer[2] == "torch.distributed.run"
    pairs = dict(zip(trainer[3:-1:2], trainer[4:-1:2], strict=False))
    assert pairs == {
        "--nnodes": "$(NODES)",
        "--node-rank": "$(NODE_RANK)",
        "--nproc-per-node": "$(RANKS_PER_NODE)",
        "--master-addr": "$(MASTER_ADDR)",
        "--master-port": "8403",
        "--max-restarts": "0",
    }


def test_tls_is_mutual_but_for_users(started: Any) -> None:
    for settings in started("default").values():
        assert settings.tls is not None
        assert settings.tls.peer_name == "paceline.internal"
        assert settings.tls.require_client == (settings.kind != "gateway")
        assert str(settings.tls.certificate) == "/etc/paceline/tls/tls.crt"
        assert settings.service_keys is None
    assert all(settings.tls is None for settings in started("no-tls").values())


def test_by_default_jobs_name_no_functions_and_no_folders(started: Any) -> None:
    for name, settings in started("default").items():
        assert settings.plugins.allowed == (), name
        assert settings.tls is not None, name
        assert not settings.insecure, name
        if settings.kind == "experience":
            assert validate(ExperienceOptions, settings.options).data_folders == ()


@pytest.mark.parametrize("feature", ["no-tls", "existing-keys"])
def test_without_certificates_each_pod_has_the_keys_of_its_kind_alone(
    started: Any, render: Render, tmp_path: Path, feature: str
) -> None:
    tracked = "services.tracking.replicas=1"
    found = started(feature, tracked)
    assert {settings.kind for settings in found.values()} == set(WorkerKind)
    secrets = {
        each["metadata"]["name"]: content(each)
        for each in render(feature, tracked)
        if each["kind"] == "Secret"
    }
    generated = secrets.get("rel-paceline-keys")
    assert (generated is None) == (feature == "existing-keys")
    installed = KEYS if generated is None else ServiceKeys.of_installation(generated["secret"])
    for name, settings in found.items():
        root = tmp_path / feature / name.replace("/", "-")
        assert settings.tls is None
        assert settings.service_keys is not None
        path = root / str(settings.service_keys).lstrip("/")
        assert [each.name for each in path.parent.iterdir()] == ["keys.json"]
        assert read_keys(path) == installed.narrowed({settings.kind}), settings.kind


def test_the_secret_of_an_installation_is_random(render: Render) -> None:
    made = {
        content(each)["secret"]
        for tool in ("helm3", "helm4")
        for each in render("no-tls", tool=tool)
        if each["metadata"]["name"] == "rel-paceline-keys"
    }
    assert len(made) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in made)


def test_ipv6_addresses_are_in_brackets(started: Any) -> None:
    for settings in started("ipv6", POD_IP="fd00::7").values():
        assert settings.host == "::"
        assert settings.advertise == "[fd00::7]:8400"


def test_settings_of_the_values_go_on_top(started: Any) -> None:
    found = started("private-registry")
    reward = found["Deployment/rl-reward"]
    assert validate(RewardOptions, reward.options).processes == 8
    assert reward.logs.level == "DEBUG"
    assert found["Deployment/rl-gateway"].logs.level == "INFO"


def test_the_gateway_knows_the_endpoints_of_environment_workers(started: Any) -> None:
    field = "services.environment.settings.options.endpoints"
    sets = (f"{field}.lab.base_url=https://lab.example.com/v1", f"{field}.lab.key_file=/s/key")
    found = started("private-registry", *sets)
    environment = validate(EnvironmentOptions, found["Deployment/rl-environment"].options)
    assert environment.endpoints["lab"].base_url == "https://lab.example.com/v1"
    assert validate(GatewayOptions, found["Deployment/rl-gateway"].options).endpoints == ("lab",)
    assert validate(RewardOptions, found["Deployment/rl-reward"].options).endpoints == {}
    other = started("private-registry")["Deployment/rl-gateway"]
    assert validate(GatewayOptions, other.options).endpoints == ()


def test_settings_of_the_values_may_be_false_and_zero(
    started: Any, altered: tuple[str, ...]
) -> None:
    found = started("default", *altered)
    assert found["Deployment/rel-paceline-gateway"].tls.require_client is True
    assert found["Deployment/rel-paceline-reward"].tls.require_client is False
    options = validate(ControllerOptions, found["Deployment/rel-paceline-controller"].options)
    assert options.scaling.idle_s == 0


def test_a_pool_has_settings_of_its_own(started: Any, altered: tuple[str, ...]) -> None:
    found = started("default", *altered)
    far, near = found["template/rollout-far.yaml"], found["template/rollout-default.yaml"]
    assert (far.site, near.site) == ("there", "here")
    assert (far.grace_s, near.grace_s) == (9, 30)
    assert far.logs.level == near.logs.level == "DEBUG"


def test_who_works_on_checkpoints_gets_their_location(started: Any) -> None:
    for feature, url in (("object-storage", "s3://our-bucket/paceline"), ("default", "")):
        for settings in started(feature).values():
            knows = settings.kind in {"trainer", "experience"}  # which deletes and copies them
            assert settings.storage == (url if knows else "")


def options_of_the_controller(found: dict[str, ServiceSettings]) -> ControllerOptions:
    (settings,) = (each for each in found.values() if each.kind == "controller")
    return validate(ControllerOptions, settings.options)


@pytest.mark.parametrize(
    ("values", "dtype"), [("default", "float32"), ("gpu-pools", "bfloat16"), ("kueue", "bfloat16")]
)
def test_the_precision_of_jobs_is_that_of_the_trainers_device(
    values: str, dtype: str, started: Any
) -> None:
    (settings,) = (each for each in started(values).values() if each.kind == "gateway")
    assert validate(GatewayOptions, settings.options).dtype == dtype


def test_controller_knows_the_names_of_the_release(started: Any, render: Render) -> None:
    kubernetes = options_of_the_controller(started("default")).kubernetes
    deployments = {o["metadata"]["name"] for o in render() if o["kind"] == "Deployment"}
    services = {o["metadata"]["name"] for o in render() if o["kind"] == "Service"}
    assert kubernetes.release == "rel"
    assert kubernetes.owner in deployments
    assert set(kubernetes.pools.values()) <= deployments
    assert kubernetes.gateway.removesuffix(":8400") in services
    assert kubernetes.training_jobs
    assert not kubernetes.jobset


def test_controller_knows_the_queues_and_pods_have_their_claims(
    started: Any, render: Render
) -> None:
    kueue = options_of_the_controller(started("kueue")).kubernetes.kueue
    assert (kueue.queue, kueue.tenants) == ("gpus", {"research": "research-gpus"})
    (templates,) = (
        o["data"] for o in render("kueue") if o["metadata"]["name"] == "rel-paceline-templates"
    )
    for name, claim in (("trainer", "one-h100"), ("rollout-default", "one-l40s")):
        pod = yaml.safe_load(templates[f"{name}.yaml"])["spec"]
        assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": claim}]
        assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]


def test_controller_knows_the_pools_of_rollout_workers(started: Any, render: Render) -> None:
    pools = options_of_the_controller(started("gpu-pools")).pools
    bounds = {name: (p.min_replicas, p.max_replicas) for name, p in pools.items()}
    assert bounds == {"h100": (0, 16), "h100-spot": (0, 64), "l40s": (1, 32)}
    assert {name: (p.cost, p.speed, p.spot) for name, p in pools.items()} == {
        "h100": (4.0, 3.0, False),
        "h100-spot": (1.6, 3.0, True),
        "l40s": (1.0, 0.8, False),
    }
    (templates,) = (
        o["data"] for o in render("gpu-pools") if o["metadata"]["name"] == "rel-paceline-templates"
    )
    assert set(templates) == {"trainer.yaml", *(f"rollout-{name}.yaml" for name in pools)}


def test_controller_scales_only_what_is_left_to_it(started: Any) -> None:
    options = options_of_the_controller(started("default"))
    assert set(options.kubernetes.pools) == {"environment", "reward"}
    assert options.scaling.environment is not None
    assert options.scaling.reward is not None
    for feature in ("external-scaling", "fixed"):
        options = options_of_the_controller(started(feature))
        assert options.kubernetes.pools == {}
        assert (options.scaling.environment, options.scaling.reward) == (None, None)


@pytest.mark.parametrize("feature", ["default", "private-registry"])
def test_issuer_gets_the_secrets_that_pods_mount(feature: str, render: Render, pods: Any) -> None:
    objects = render(feature)
    issues = [
        validate(Issue, yaml.safe_load(o["data"]["issue.yaml"]))
        for o in objects
        if o["kind"] == "ConfigMap" and "issue.yaml" in o.get("data", {})
    ]
    assert len(issues) == 2
    assert issues[0] == issues[1]
    issue = issues[0]
    mounted = {
        volume["secret"]["secretName"]
        for template in pods(objects).values()
        for volume in template["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert {leaf.secret for leaf in issue.services.values()} == mounted
    for service in (o["metadata"]["name"] for o in objects if o["kind"] == "Service"):
        component = service.rpartition("-")[2]
        if component != "store":
            assert {service, f"{service}.training.svc"} <= set(issue.names(component))


def test_the_bandwidth_of_weights_can_be_capped(started: Any, altered: tuple[str, ...]) -> None:
    found = {s.kind: s.options for s in started("default", *altered).values()}
    assert validate(TrainerOptions, found[WorkerKind.TRAINER]).weights_bytes_per_s == 50e6
    assert found[WorkerKind.ROLLOUT]["weights_mbit_per_s"] == 1500
    assert "weights_mbit_per_s" not in found[WorkerKind.EXPERIENCE]
    free = {s.kind: s.options for s in started("minimal").values()}
    assert validate(TrainerOptions, free[WorkerKind.TRAINER]).weights_bytes_per_s == 0.0


def test_those_that_trace_know_where_to_and_read_their_secrets(started: Any) -> None:
    found = started("tracing")
    traced = {name: one.tracing for name, one in found.items() if one.tracing is not None}
    kinds = {str(one.kind) for one in found.values() if one.tracing is not None}
    assert kinds == {"experience", "environment", "reward", "rollout", "trainer"}
    for tracing in traced.values():
        assert tracing.endpoint == "https://collector.monitoring:4317"
        assert tracing.sample == 0.05
        assert str(tracing.headers_file) == "/etc/paceline/secrets/tracing-headers/headers"
        assert str(tracing.authority) == "/etc/paceline/secrets/tracing-authority/ca.crt"
    assert all(one.tracing is None for one in started("default").values())


def test_an_operator_says_where_tokenizers_run(started: Any, altered: tuple[str, ...]) -> None:
    shared = {"environment", "gateway", "tracking"}
    found = {each.kind.value: each.tokenizers for each in started("default", *altered).values()}
    assert {found[kind].timeout_s for kind in shared} == {7.0}
    assert {found[kind].run_in for kind in shared} == {"process"}
    moved = started("default", "tokenizers.run_in=in_process").values()
    assert {each.tokenizers.run_in for each in moved if each.kind.value in shared} == {"in_process"}
