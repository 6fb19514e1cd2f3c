"""Pods: selectors, volumes, probes, grace periods, placement, budgets, images."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

FEATURES = sorted(
    path.name.removesuffix("-values.yaml")
    for path in (Path(__file__).resolve().parents[2] / "deploy/helm/paceline/ci").iterdir()
)
# What is not of the chart: made by the issuer, or named by values files of `ci/`.
BY_OTHERS = re.compile(r"(rel-paceline|rl)-tls-[a-z]+$|our-")

Object = dict[str, Any]
Render = Callable[..., list[Object]]


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def selected(labels: dict[str, str], templates: dict[str, Object]) -> set[str]:
    return {
        name
        for name, template in templates.items()
        if labels.items() <= template["metadata"]["labels"].items()
    }


def container_of(template: Object) -> Object:
    (container,) = template["spec"]["containers"]
    return container


@pytest.mark.parametrize("feature", FEATURES)
def test_selectors_select_their_own_pods_only(feature: str, render: Render, pods: Any) -> None:
    objects = render(feature)
    templates = pods(objects)
    for kind in ("Deployment", "StatefulSet"):
        for name, one in named(objects, kind).items():
            labels = one["spec"]["selector"]["matchLabels"]
            assert selected(labels, templates) == {f"{kind}/{name}"}
            assert "version" not in "".join(labels) + "".join(labels.values())
    for name, service in named(objects, "Service").items():
        (found,) = selected(service["spec"]["selector"], templates)
        assert found.endswith(f"/{name}")
        ports = {port["name"] for port in container_of(templates[found])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for name, budget in named(objects, "PodDisruptionBudget").items():
        labels = budget["spec"]["selector"]["matchLabels"]
        (found,) = selected(labels, templates)
        assert found.endswith(f"/{name}") or name.endswith(f"-{found[9:-5]}")


def test_services_have_the_names_and_ports_that_others_dial(render: Render) -> None:
    services = {
        name: {port["name"]: port["port"] for port in one["spec"]["ports"]}
        for name, one in named(render(), "Service").items()
    }
    assert services == {
        "rel-paceline-gateway": {"http": 8300, "grpc": 8400},
        "rel-paceline-experience": {"grpc": 8400},
        "rel-paceline-store": {"store": 6379},
    }


@pytest.mark.parametrize(
    ("release", "fullname"),
    [("rel", "rel-paceline"), ("paceline", "paceline"), ("my-paceline-2", "my-paceline-2")],
)
def test_names_begin_with_the_release(release: str, fullname: str, helm: Any, chart: Path) -> None:
    done = helm("helm3", "template", release, str(chart))
    names = named([d for d in yaml.load_all(done.stdout, yaml.CSafeLoader) if d], "Deployment")
    assert set(names) == {
        f"{fullname}-{part}"
        for part in ("gateway", "controller", "experience", "environment", "reward")
    }


@pytest.mark.parametrize("feature", FEATURES)
def test_every_mount_has_its_volume_and_every_volume_its_source(
    feature: str, render: Render, pods: Any
) -> None:
    objects = render(feature)
    sources = {
        "configMap": ("name", named(objects, "ConfigMap")),
        "secret": ("secretName", named(objects, "Secret")),
        "persistentVolumeClaim": ("claimName", named(objects, "PersistentVolumeClaim")),
    }
    claims = {"data"} if named(objects, "StatefulSet") else set[str]()
    for name, template in pods(objects).items():
        container = container_of(template)
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert mounts - (claims if "StatefulSet" in name else set()) <= set(volumes), name
        assert set(volumes) <= mounts, name
        for volume in volumes.values():
            for kind, (key, known) in sources.items():
                if kind in volume:
                    target = volume[kind][key]
                    assert target in known or BY_OTHERS.match(target), (name, target)


def test_writable_paths_are_volumes(render: Render, pods: Any) -> None:
    for name, template in pods(render()).items():
        mounts = {m["mountPath"]: m for m in container_of(template)["volumeMounts"]}
        assert "readOnly" not in mounts["/tmp"]
        if not re.search("store|certificates", name):
            assert {"/var/lib/paceline", "/dev/shm"} <= set(mounts), name
        for path, mount in mounts.items():
            if path.startswith("/etc/"):
                assert mount["readOnly"], (name, path)


def data_volume(template: Object) -> tuple[str, bool]:
    (mount,) = (m for m in container_of(template)["volumeMounts"] if m["name"] == "data")
    (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "data")
    return next(iter(set(volume) - {"name"})), mount.get("readOnly", False)


def test_which_pods_mount_the_data_volume(render: Render, pods: Any) -> None:
    templates = {
        name: template for name, template in pods(render()).items() if "certificates" not in name
    }
    del templates["StatefulSet/rel-paceline-store"]
    shared = {
        "Deployment/rel-paceline-gateway": ("persistentVolumeClaim", True),
        "Deployment/rel-paceline-experience": ("persistentVolumeClaim", False),
        "template/trainer.yaml": ("persistentVolumeClaim", False),
    }
    for name, template in templates.items():
        assert data_volume(template) == shared.get(name, ("emptyDir", False)), name
    for name, template in pods(render("object-storage")).items():
        if name in shared:
            assert data_volume(template) == ("emptyDir", False)


@pytest.mark.parametrize("feature", FEATURES)
def test_probes_and_grace(feature: str, render: Render, pods: Any) -> None:
    objects = render(feature)
    settings = {
        name: yaml.safe_load(one["data"]["settings.yaml"])
        for name, one in named(objects, "ConfigMap").items()
        if "settings.yaml" in one.get("data", {})
    }
    for name, template in pods(objects).items():
        container = container_of(template)
        if not any(port["name"] == "metrics" for port in container.get("ports", [])):
            continue
        probes = {key: container[f"{key}Probe"]["httpGet"] for key in ("startup", "liveness")}
        assert {probe["path"] for probe in probes.values()} == {"/livez"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
        (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "settings")
        own = settings[volume["configMap"]["name"]]
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        before = int(sleep.get("command", [0, 0])[1])
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace > own["grace_s"] + before or name.startswith("template/rollout"), name


def test_grace_of_a_pool_is_its_own(render: Render, pods: Any) -> None:
    templates = pods(render("gpu-pools"))
    grace = {
        name: template["spec"].get("terminationGracePeriodSeconds")
        for name, template in templates.items()
    }
    assert grace["template/rollout-h100.yaml"] == 40
    assert grace["template/rollout-h100-spot.yaml"] == 30
    spot = container_of(templates["template/rollout-h100-spot.yaml"])["args"]
    assert "grace_s=20" in spot
    assert "grace_s=30" in container_of(templates["template/rollout-h100.yaml"])["args"]


def test_environment_of_every_pod_is_downward(render: Render, pods: Any) -> None:
    for name, template in pods(render()).items():
        if re.search("store|certificates", name):
            continue
        env = {one["name"]: one for one in container_of(template)["env"]}
        fields = {
            key: env[key]["valueFrom"]["fieldRef"]["fieldPath"]
            for key in ("POD_NAME", "POD_IP", "NAMESPACE")
        }
        assert fields == {
            "POD_NAME": "metadata.name",
            "POD_IP": "status.podIP",
            "NAMESPACE": "metadata.namespace",
        }
        assert container_of(template)["name"] == "paceline"


def test_python_imports_nothing_from_where_it_is_started(render: Render, pods: Any) -> None:
    objects = render()
    found = pods(objects) | named(objects, "Pod")
    containers = {name: container_of(template) for name, template in found.items()}
    run_python = {n: c for n, c in containers.items() if c.get("command", [""])[0] == "python"}
    modules = {container["command"][-1] for container in run_python.values()}
    assert {"paceline_trainer.smoke_test", "paceline_controller.certificates"} <= modules
    for name, container in run_python.items():
        assert container["workingDir"] == "/", name
        assert {"name": "PYTHONSAFEPATH", "value": "1"} in container["env"], name


def test_counts_that_others_set_are_left_out(render: Render) -> None:
    def counts(feature: str) -> dict[str, int | None]:
        deployments = named(render(feature), "Deployment")
        return {
            name.rpartition("-")[2]: one["spec"].get("replicas")
            for name, one in deployments.items()
        }

    alone = {"gateway": 2, "controller": 2, "experience": 1}
    assert counts("default") == alone | {"environment": None, "reward": None}
    assert counts("external-scaling") == alone | {"environment": None, "reward": None}
    assert counts("fixed") == alone | {"environment": 8, "reward": 4}
    assert counts("high-availability")["gateway"] is None


def test_autoscalers_have_their_target(render: Render) -> None:
    objects = render("high-availability")
    ((name, one),) = named(objects, "HorizontalPodAutoscaler").items()
    assert one["spec"]["scaleTargetRef"]["name"] == name
    assert name in named(objects, "Deployment")
    assert (one["spec"]["minReplicas"], one["spec"]["maxReplicas"]) == (3, 12)


def test_how_pods_are_replaced(render: Render) -> None:
    deployments = named(render(), "Deployment")
    strategy = {name.rpartition("-")[2]: d["spec"]["strategy"] for name, d in deployments.items()}
    assert strategy["experience"] == {"type": "Recreate"}
    assert strategy["gateway"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert strategy["environment"]["rollingUpdate"]["maxUnavailable"] == "25%"
    budgets = named(render("high-availability"), "PodDisruptionBudget")
    assert budgets["rel-paceline-gateway"]["spec"]["minAvailable"] == 2
    assert "maxUnavailable" not in budgets["rel-paceline-gateway"]["spec"]


def changed(render: Render, pods: Any, *sets: str) -> set[str]:
    """Pods that an upgrade replaces when these values change."""
    before, after = pods(render()), pods(render("default", *sets))
    return {
        name
        for name in before.keys() | after.keys()
        if not re.search("Job/", name) and before.get(name) != after.get(name)
    }


def test_an_upgrade_replaces_what_changed(render: Render, pods: Any) -> None:
    one = "services.reward.settings.options.processes=5"
    assert changed(render, pods, one) == {"Deployment/rel-paceline-reward"}
    pool = "rollout.pools.big.cost=2"
    assert changed(render, pods, pool) == {
        "Deployment/rel-paceline-controller",
        "template/rollout-big.yaml",
    }
    store = "store.embedded.fsync=always"
    assert changed(render, pods, store) == {"StatefulSet/rel-paceline-store"}
    trainer = "trainer.settings.logs.level=DEBUG"
    assert changed(render, pods, trainer) == {
        "Deployment/rel-paceline-controller",
        "template/trainer.yaml",
    }
    assert changed(render, pods, "ingress.className=nginx") == set()


def test_pools_have_their_machines(render: Render, pods: Any) -> None:
    objects = render("gpu-pools")
    templates = pods(objects)
    products = {
        name: template["spec"].get("nodeSelector", {}).get("nvidia.com/gpu.product")
        for name, template in templates.items()
        if name.startswith("template/")
    }
    h100 = "NVIDIA-H100-80GB-HBM3"
    assert products == {
        "template/trainer.yaml": h100,
        "template/rollout-h100.yaml": h100,
        "template/rollout-h100-spot.yaml": h100,
        "template/rollout-l40s.yaml": "NVIDIA-L40S",
    }
    trainer = templates["template/trainer.yaml"]["spec"]
    assert trainer["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert trainer["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert trainer["restartPolicy"] == "Never"
    classes = named(objects, "PriorityClass")
    used = {t["spec"].get("priorityClassName") for t in templates.values()} - {None}
    assert used == set(classes)
    for name, template in templates.items():
        if name.startswith("template/rollout-"):
            pool = template["metadata"]["labels"]["paceline.dev/pool"]
            assert name == f"template/rollout-{pool}.yaml"


def test_pods_spread_over_machines_and_accelerators_are_filled(render: Render, pods: Any) -> None:
    for name, template in pods(render()).items():
        spread = template["spec"].get("topologySpreadConstraints", [])
        assert bool(spread) != name.startswith("template/")
        for constraint in spread:
            labels = template["metadata"]["labels"]
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_no_limits_by_default(render: Render, pods: Any) -> None:
    for template in pods(render()).values():
        assert "limits" not in container_of(template).get("resources", {})


def test_ranks_have_their_grace_before_torchrun_kills_them(
    render: Render, pods: Any, altered: tuple[str, ...]
) -> None:
    trainer = pods(render("default", *altered))["template/trainer.yaml"]
    container = container_of(trainer)
    assert "grace_s=300" in container["args"]
    (kills,) = (e for e in container["env"] if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert 300 < int(kills["value"]) < trainer["spec"]["terminationGracePeriodSeconds"]


def test_experience_starts_again_with_another_store(render: Render) -> None:
    def annotations(url: str) -> dict[str, str]:
        one = named(render("default", f"store.url={url}"), "Deployment")["rel-paceline-experience"]
        return one["spec"]["template"]["metadata"]["annotations"]

    assert annotations("redis://a") == annotations("redis://a")
    assert annotations("redis://a") != annotations("redis://b")


def test_recreate_has_no_bounds_of_a_rolling_update(
    render: Render, altered: tuple[str, ...]
) -> None:
    objects = render("default", *altered)
    spec = named(objects, "Deployment")["rel-paceline-environment"]["spec"]
    assert spec["strategy"] == {"type": "Recreate"}


def test_images(render: Render, pods: Any) -> None:
    images = {name: container_of(t)["image"] for name, t in pods(render()).items()}
    assert images["Deployment/rel-paceline-gateway"] == "paceline-gateway:0.1.0"
    assert images["Job/rel-paceline-certificates-hook"] == "paceline-controller:0.1.0"
    ours = pods(render("private-registry"))
    images = {name: container_of(t)["image"] for name, t in ours.items()}
    registry = "registry.example.com/ml"
    assert images["template/trainer.yaml"] == f"{registry}/rl-trainer:1.2"
    assert images["Deployment/rl-environment"] == f"{registry}/rl-environment-with-tools:7"
    assert images["Deployment/rl-reward"].startswith(f"{registry}/rl-reward@sha256:0123")
    for name, template in ours.items():
        assert template["spec"]["imagePullSecrets"] == [{"name": "our-registry"}], name
        assert container_of(template)["imagePullPolicy"] == "Always", name


def test_what_is_added_to_pods(render: Render, pods: Any) -> None:
    for name, template in pods(render("private-registry")).items():
        container = container_of(template)
        assert template["metadata"]["annotations"]["example.com/team"] == "rl"
        assert template["metadata"]["labels"]["example.com/cost-centre"] == "42"
        if re.search("store|certificates", name):
            continue
        assert {"name": "HTTPS_PROXY", "value": "proxy.example.com:3128"} in container["env"]
        assert container["envFrom"] == [{"configMapRef": {"name": "our-settings"}}]
        assert "/etc/ssl/ours" in {m["mountPath"] for m in container["volumeMounts"]}
        assert (template["spec"].get("runtimeClassName") == "gvisor") == ("environment" in name)


def test_pods_with_code_of_jobs_may_have_another_seccomp_profile(render: Render, pods: Any) -> None:
    found = pods(
        render(
            "default",
            "services.reward.seccompProfile.type=Localhost",
            "services.reward.seccompProfile.localhostProfile=profiles/sandbox.json",
            "services.reward.hostUsers=false",
        )
    )
    for name, template in found.items():
        spec, ours = template["spec"], "reward" in name
        profile = spec["securityContext"]["seccompProfile"]
        assert profile["type"] == ("Localhost" if ours else "RuntimeDefault"), name
        assert profile.get("localhostProfile") == ("profiles/sandbox.json" if ours else None)
        assert spec.get("hostUsers") == (False if ours else None)


def test_the_embedded_store_persists_its_data(render: Render) -> None:
    objects = render("high-availability")
    lines = named(objects, "ConfigMap")["rel-paceline-store"]["data"]["store.conf"].splitlines()
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction"} <= set(lines)
    assert lines[0] == "include /etc/paceline/secrets/store/password.conf"
    (claim,) = named(objects, "StatefulSet")["rel-paceline-store"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    for feature in ("external-store", "external-cluster", "existing-secrets"):
        assert not named(render(feature), "StatefulSet")


def test_the_embedded_store_uses_an_existing_password(render: Render, pods: Any) -> None:
    objects = render("default", "store.embedded.existingSecret=ours")
    assert "rel-paceline-store" not in named(objects, "Secret")
    templates = pods(objects)
    for name in ("StatefulSet/rel-paceline-store", "Deployment/rel-paceline-experience"):
        volumes = {volume["name"]: volume for volume in templates[name]["spec"]["volumes"]}
        assert volumes["secret-store"]["secret"]["secretName"] == "ours"
    other = render("external-store", "store.embedded.existingSecret=ours")
    assert "rel-paceline-store" in named(other, "Secret")


def test_cert_manager_issues_what_the_pods_mount(render: Render, pods: Any) -> None:
    objects = render("cert-manager")
    certificates = named(objects, "Certificate")
    issued = {one["spec"]["secretName"]: one["spec"] for one in certificates.values()}
    mounted = {
        volume["secret"]["secretName"]
        for template in pods(objects).values()
        for volume in template["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert mounted == set(issued) - {"rel-paceline-tls-authority"}
    issuers = named(objects, "Issuer")
    for secret in mounted:
        spec = issued[secret]
        role = secret.rpartition("-")[2]
        assert {"paceline.internal", f"{role}.paceline.internal"} <= set(spec["dnsNames"])
        assert spec["usages"] == ["digital signature", "server auth", "client auth"]
        assert spec["issuerRef"]["name"] in issuers
        assert (spec["duration"], spec["renewBefore"]) == ("720h", "240h")
    assert "grpc.paceline.example.com" in issued["rel-paceline-tls-gateway"]["dnsNames"]
    assert issued["rel-paceline-tls-authority"]["isCA"]
    assert not named(objects, "CronJob")
    ours = render("cert-manager-issuer")
    assert not named(ours, "Issuer")
    kinds = {c["spec"]["issuerRef"]["kind"] for c in named(ours, "Certificate").values()}
    assert kinds == {"ClusterIssuer"}


def test_ingress_leads_to_the_gateway(render: Render) -> None:
    objects = render("ingress")
    (ingress,) = named(objects, "Ingress").values()
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    service = named(objects, "Service")[backend["name"]]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert rule["host"] == "paceline.example.com"


def test_pod_monitor_finds_every_pod_with_metrics(render: Render, pods: Any) -> None:
    objects = render("monitoring")
    (monitor,) = named(objects, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    for name, template in pods(objects).items():
        labels = template["metadata"]["labels"]
        found = wanted <= labels.items() and labels[expression["key"]] not in expression["values"]
        ports = {port["name"] for port in container_of(template).get("ports", [])}
        assert found == (endpoint["port"] in ports), name
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert not named(render(), "PodMonitor")
