"""The chart renders to valid objects, with helm 3 and 4, for every values file in `ci/`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FEATURES = sorted(
    path.name.removesuffix("-values.yaml")
    for path in (ROOT / "deploy" / "helm" / "paceline" / "ci").glob("*-values.yaml")
)
HELMS = ("helm3", "helm4")
OLDEST, NEWEST = "1.29", "1.37"
# Not part of Kubernetes: what the chart may set in them is checked below.
CUSTOM = {"Certificate", "Issuer", "PodMonitor", "PrometheusRule"}
FIELDS = {
    "Certificate": {
        *("secretName", "duration", "renewBefore", "privateKey", "usages", "dnsNames"),
        *("issuerRef", "isCA", "commonName"),
    },
    "Issuer": {"selfSigned", "ca"},
    "PodMonitor": {"selector", "podTargetLabels", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"},
}

Render = Callable[..., list[dict[str, Any]]]
Pods = Callable[[list[dict[str, Any]]], dict[str, dict[str, Any]]]


def test_helm_is_of_the_versions_that_the_readme_names(helm: Any) -> None:
    assert helm("helm3", "version", "--short").stdout.startswith("v3.17.")
    assert helm("helm4", "version", "--short").stdout.startswith("v4.")


@pytest.mark.parametrize("tool", HELMS)
def test_lint(tool: str, chart: Path, helm: Any) -> None:
    done = helm(tool, "lint", "--strict", str(chart))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("feature", FEATURES)
def test_lint_of_a_feature(feature: str, chart: Path, helm: Any) -> None:
    """Of which other tests show that it renders, by both helms, what Kubernetes takes."""
    values = str(chart / "ci" / f"{feature}-values.yaml")
    done = helm(HELMS[-1], "lint", "--strict", str(chart), "-f", values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def takes() -> Callable[[dict[str, Any]], None]:
    """Check an object against the oldest and the newest Kubernetes; the same one only once.

    Claims of pods are stable from Kubernetes 1.34 on, and had another form before 1.31.
    """
    seen: set[str] = set()

    def check(one: dict[str, Any]) -> None:
        text = json.dumps(one, sort_keys=True)
        if text not in seen:
            has_claims = "resourceClaims" in one.get("spec", {})
            for version in (NEWEST,) if has_claims else (OLDEST, NEWEST):
                kubernetes_validate.validate(one, version, strict=True)
            seen.add(text)

    return check


def test_wrong_objects_are_seen(takes: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(kubernetes_validate.ValidationError, match="replcas"):
        takes({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replcas": 1}})


@pytest.mark.parametrize("feature", FEATURES)
def test_kubernetes_takes_every_object(feature: str, render: Render, takes: Any) -> None:
    for one in render(feature):
        if one["kind"] in CUSTOM:
            assert set(one["spec"]) <= FIELDS[one["kind"]]
        else:
            takes(one)


@pytest.mark.parametrize("feature", FEATURES)
def test_kubernetes_takes_the_pods_of_jobs(
    feature: str, render: Render, pods: Pods, takes: Any
) -> None:
    templates = pods(render(feature))
    jobs = {name: pod for name, pod in templates.items() if name.startswith("template/")}
    assert len(jobs) >= 2
    for name, template in jobs.items():
        as_object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}} | template
        takes(as_object)
        assert "name" not in template["metadata"], name


@pytest.mark.parametrize("feature", FEATURES)
def test_both_helms_render_the_same(feature: str, render: Render) -> None:
    old, new = (without_chance(render(feature, tool=tool)) for tool in HELMS)
    assert old == new


def without_chance(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Objects by name, without the values of Secrets, which are random."""
    for one in objects:
        if one["kind"] == "Secret":
            one["data"] = sorted(one.get("data", {}))
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize("feature", FEATURES)
def test_names_are_unique_and_labelled(feature: str, render: Render) -> None:
    objects = render(feature)
    # Hooks after the deletion take the names of those before the installation, to remove them.
    stay = [
        one
        for one in objects
        if one["metadata"].get("annotations", {}).get("helm.sh/hook") != "post-delete"
    ]
    names = [(one["kind"], one["metadata"]["name"]) for one in stay]
    assert len(set(names)) == len(names)
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "paceline"
        assert labels["app.kubernetes.io/instance"] == "rel"


def test_names_fit_with_the_longest_release_name(helm: Any, chart: Path) -> None:
    done = helm("helm4", "template", "r" * 53, str(chart))
    for one in yaml.load_all(done.stdout, yaml.CSafeLoader):
        assert len(one["metadata"]["name"]) <= (52 if one["kind"] == "CronJob" else 63)


def test_every_value_is_documented(chart: Path) -> None:
    """Every value has a comment, or is explained by `defaults` or a neighbour."""
    readme = (chart / "README.md").read_text()
    values = yaml.load((chart / "values.yaml").read_text(), yaml.CSafeLoader)
    explained = set(values["defaults"])
    missing = [
        path
        for path in leaves(values)
        if not any(f"| `{'.'.join(path[:n])}` |" in readme for n in range(1, len(path) + 1))
        and not explained & set(path)
    ]
    assert missing == []


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for key, below in value.items() for leaf in leaves(below, (*path, key))]


def test_package_holds_what_is_needed(chart: Path, helm: Any, tmp_path: Path) -> None:
    done = helm("helm3", "package", str(chart), "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("paceline-*.tgz")
    again = helm("helm4", "template", "rel", str(archive))
    assert again.returncode == 0, again.stderr
    assert "trainingjobs.paceline.dev" in again.stdout


def test_notes_show_the_next_command(chart: Path, helm: Any) -> None:
    # Helm 3 asks for a cluster before it prints notes; they are rendered by `template` with both.
    install = ("install", "rel", str(chart), "-n", "training", "--dry-run=client")
    notes = helm("helm4", *install).stdout
    assert "port-forward service/rel-paceline-gateway 8300:8300" in notes
    assert "kubectl -n training get secret rel-paceline-token" in notes
    assert "paceline submit job.yaml" in notes


def test_appversion_is_that_of_the_code(chart: Path) -> None:
    import paceline

    assert (
        yaml.load((chart / "Chart.yaml").read_text(), yaml.CSafeLoader)["appVersion"]
        == paceline.__version__
    )
