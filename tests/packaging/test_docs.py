"""Names in the docs exist: chart values, commands, make targets, links, job files."""

import ast
import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from paceline.config import JobSpec
from paceline.config.load import parse_job
from paceline.front.cli.entry import parser
from paceline.platform.telemetry.metric_names import NAMES

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "paceline"
DECISIONS = ROOT / "docs" / "decisions"
PLACES = (
    ROOT,
    *(ROOT / name for name in ("docs", "docs/plugins", "docker")),
    *(CHART, ROOT / "examples", DECISIONS),
)
DOCS = sorted(path for place in PLACES for path in place.glob("*.md"))
ON_CLUSTERS = [path for path in DOCS if path.parent in PLACES[1:4]]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
METRICS = {spec.name for spec in NAMES.values()}
NUMBER_OR_LIST = re.compile(r"^\{(.*)\}$")


class TolerantLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without the function that makes anchors."""


def nothing(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> None:
    """What such a tag is read as."""
    del loader, suffix, node


TolerantLoader.add_multi_constructor("tag:yaml.org,2002:python/", nothing)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [body for found, body in FENCE.findall(path.read_text()) if found == language]


def spans(path: Path) -> list[str]:
    """The code within lines."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text()))


def spans_of_ours(path: Path) -> list[str]:
    """The same without names of other frameworks, which are in the first column of their page."""
    if path.name != "coming-from.md":
        return spans(path)
    cells = re.findall(r"^\|.*?[^\\]\|(.*)\|$", path.read_text(), re.MULTILINE)
    return [span for cell in cells for span in re.findall(r"`([^`\n]+)`", cell)]


def commands(path: Path) -> list[str]:
    """Command lines of all shell blocks, without comments, continued lines joined."""
    text = "\n".join(blocks(path, "sh") + blocks(path, "")).replace("\\\n", " ")
    return [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]


@cache
def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


@cache
def defaults() -> dict[str, Any]:
    return yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)


def merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        keys = [*below, *(key for key in above if key not in below)]
        return {k: merged(below.get(k), above[k]) if k in above else below[k] for k in keys}
    return above


def check_values(values: dict[str, Any]) -> None:
    """Merge values over the chart's own and validate them, like helm."""
    jsonschema.validate(merged(defaults(), values), schema())


def nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def settings_of(command: str) -> list[tuple[str, Any]]:
    """The `--set` of a helm command."""
    found = re.findall(r"--set[= ](\S+?)=(\S+)", command)
    return [(key, value_of(text)) for key, text in found]


def value_of(text: str) -> Any:
    listed = NUMBER_OR_LIST.match(text)
    return listed[1].split(",") if listed else yaml.load(text, yaml.CSafeLoader)


def in_schema(dotted: str) -> bool:
    """Whether the chart has a value of this name."""
    here: Any = schema()
    for key in dotted.split("."):
        here = resolved(here)
        below = here.get("properties", {}).get(key)
        free = here.get("additionalProperties", "properties" not in here)
        if below is None and free is False:
            return False
        here = below if below is not None else (free if isinstance(free, dict) else {})
    return True


def resolved(part: dict[str, Any]) -> dict[str, Any]:
    reference = part.get("$ref", "")
    return schema()["definitions"][reference.rpartition("/")[2]] if reference else part


def in_job_file(dotted: str) -> bool:
    """Whether the job file has a field of this name; plug-ins have options of their own."""
    here: Any = JobSpec
    for key in dotted.split("."):
        if not (isinstance(here, type) and issubclass(here, BaseModel)):
            return True
        if key not in here.model_fields:
            return here.model_config.get("extra") == "allow"
        here = model_in(here.model_fields[key].annotation)
    return True


def model_in(annotation: Any) -> Any:
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if models else None


def value_blocks() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{ids(path)}-{number}", yaml.load(body, yaml.CSafeLoader))
        for path in DOCS
        for number, body in enumerate(blocks(path, "yaml"))
        if body.startswith("# values.yaml")
    ]


@pytest.mark.parametrize(
    "values", [v for _, v in value_blocks()], ids=[n for n, _ in value_blocks()]
)
def test_values_files_in_documents_are_accepted_by_the_chart(values: dict[str, Any]) -> None:
    check_values(values)


def test_there_are_values_files_and_wrong_ones_are_refused() -> None:
    assert len(value_blocks()) >= 8
    with pytest.raises(jsonschema.ValidationError):
        check_values({"rollout": {"pools": {"default": {"price": 2}}}})


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_helm_commands_set_values_that_exist(path: Path) -> None:
    for command in [*commands(path), *spans(path)]:
        if not command.startswith("helm "):
            continue
        for key, value in settings_of(command):
            assert in_schema(key), key
            if "$" not in str(value):
                check_values(nested(key, value))


@pytest.mark.parametrize("path", ON_CLUSTERS, ids=ids)
def test_dotted_names_are_values_of_the_chart_or_fields_of_the_job_file(path: Path) -> None:
    sections = {*defaults(), *JobSpec.model_fields}
    for span in spans_of_ours(path):
        key = re.fullmatch(r"(?:--set )?([a-zA-Z_]+(?:\.[a-zA-Z_]+)+)(=.*)?", span)
        if key is None or key[1].partition(".")[0] not in sections:
            continue
        if key[1].endswith((".yaml", ".json", ".safetensors", ".py", ".md", ".Dockerfile")):
            continue
        assert in_schema(key[1]) or in_job_file(key[1]), f"{span}: no such value or field"


def test_names_that_do_not_exist_are_noticed() -> None:
    assert in_schema("store.embedded.fsync")
    assert not in_schema("store.embedded.sync")
    assert not in_schema("services.proxy.replicas")
    assert in_job_file("trainer.checkpoint.keep")
    assert in_job_file("rollout.engine.python")
    assert not in_job_file("trainer.checkpoint.copies")


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_paceline_commands_are_accepted(path: Path) -> None:
    for line in [*commands(path), *spans(path)]:
        found = re.match(r"(?:\.venv/bin/)?paceline ([a-z].*)", line)
        if found is None or "://…" in line or "[" in line:
            continue
        words = shlex.split(re.split(r" [|&>]", found[1])[0])
        if not {"--help", "-h"} & set(words):
            parsed = parser().parse_args(words if len(words) > 1 else with_operands(words[0]))
            assert parsed.handler


def with_operands(command: str) -> list[str]:
    """Add the required arguments to a command that the docs only name."""
    if command == "export":
        return [command, "X", "--best", "--output", "DIR"]
    needs = {"run", "submit", "try", "validate", "watch", "cancel", "verify"}
    needs |= {"pause", "resume", "fork", "delete"}
    needs.add("checkpoints")
    return [command, "X"] if command in needs else [command]


def targets() -> list[str]:
    text = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z0-9% -]+):(?!=)", text, re.MULTILINE)
    return [name for rule in rules for name in rule.split()]


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_make_targets_exist(path: Path) -> None:
    known = [re.compile(name.replace("%", ".+")) for name in targets()]
    for line in [*commands(path), *spans(path)]:
        for name in re.findall(r"^make (\S+)", line):
            bare = re.sub(r"\$\{?\w+\}?", "x", name)
            assert "=" in bare or any(rule.fullmatch(bare) for rule in known), line


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", path.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{target}: no such file"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{target}: no such heading"


def test_the_ratios_of_the_readme_are_those_of_the_results() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "trl.json").read_text())["cases"]
    ratios = re.findall(r"\| ([\d.]+) \W \|", (ROOT / "README.md").read_text())
    for shown, case in zip(ratios, ("demo", "slow", "smollm2"), strict=True):
        measured = cases[case]["ratio"]["samples_per_s"]["median"]
        assert shown == f"{measured:.{len(shown.partition('.')[2])}f}"


@cache
def docstrings() -> str:
    """The docstrings of all modules."""
    sources = (path for top in ("dev", "services", "shared") for path in (ROOT / top).rglob("*.py"))
    return "\n".join(ast.get_docstring(ast.parse(path.read_text())) or "" for path in sources)


@pytest.mark.parametrize("path", sorted(DECISIONS.glob("*.md")), ids=ids)
def test_decisions_are_complete_and_lead_to_their_modules_and_back(path: Path) -> None:
    assert f"Decisions: {path.relative_to(ROOT)}." in docstrings(), "named by no module"
    assert f"({path.relative_to(ROOT)})" in (ROOT / "ARCHITECTURE.md").read_text()
    _, *decisions = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
    assert decisions
    for text in decisions:
        heading = text.partition("\n")[0]
        assert re.findall(r"^\*\*(Context|Decision)\.\*\*", text, re.MULTILINE) == [
            "Context",
            "Decision",
        ], heading
        (code,) = re.findall(r"^Code: ((?:.+\n)+)", text, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", code):
            assert (ROOT / name).exists(), f"{heading}: no {name}"


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_lists_are_read_alike_on_github_and_on_the_site(path: Path) -> None:
    """The site's Markdown wants four spaces where a paragraph of a list entry begins."""
    assert re.findall(r"\n\n {2,3}\S.*", FENCE.sub("", path.read_text())) == []


def test_the_site_has_every_page() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), TolerantLoader)
    listed = re.findall(r"[\w/-]+\.md", json.dumps(site["nav"]))
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


# The other one lists names of before.
@pytest.mark.parametrize("path", [path for path in DOCS if path.name != "upgrade.md"], ids=ids)
def test_metrics_exist(path: Path) -> None:
    rules = (CHART / "files" / "monitoring" / "rules").glob("*.yaml")
    recorded = {name for rule in rules for name in re.findall(r"record: (\S+)", rule.read_text())}
    for span in spans(path):
        found = re.fullmatch(r"(paceline_[a-z_]+_?|paceline:[a-z_:]+)(\{.*\})?", span)
        if found and not (ROOT / "services" / found[1]).is_dir():
            assert found[1] in recorded | METRICS, f"{span}: no such metric"


@pytest.mark.parametrize("path", ON_CLUSTERS, ids=ids)
def test_files_of_the_repository_in_commands_exist(path: Path) -> None:
    for line in commands(path):
        for name in re.findall(r"(?:^|[\s=@])((?:examples|deploy|docker|docs)/[\w./-]+)", line):
            if not name.endswith(".env"):
                assert (ROOT / name).exists(), f"{line}: no {name}"


def test_the_object_and_the_file_of_the_first_job_are_the_same_job() -> None:
    body = yaml.load((ROOT / "examples" / "trainingjob.yaml").read_text(), yaml.CSafeLoader)
    assert (body["apiVersion"], body["kind"]) == ("paceline.dev/v1alpha1", "TrainingJob")
    definition = yaml.load((CHART / "files" / "trainingjob.yaml").read_text(), yaml.CSafeLoader)
    (version,) = definition["spec"]["versions"]
    jsonschema.Draft4Validator(version["schema"]["openAPIV3Schema"]).validate(body)
    job = parse_job({**body["spec"], "name": body["metadata"]["name"]})
    file = parse_job(
        yaml.load((ROOT / "examples" / "arithmetic.yaml").read_text(), yaml.CSafeLoader)
    )
    path = f"/var/lib/paceline/{file.model.path}"
    assert job == file.model_copy(update={"model": file.model.model_copy(update={"path": path})})


@pytest.fixture(scope="module")
def names(render: Callable[..., list[dict[str, Any]]]) -> set[str]:
    """Objects of a release called `paceline` and of the example manifests."""
    made = [
        body
        for feature in ("default", "no-tls")
        for body in render(feature, "fullnameOverride=paceline")
        if body["metadata"]["name"].startswith("paceline")
    ]
    for path in (ROOT / "examples").glob("*-pod.yaml"):
        made.append(yaml.load(path.read_text(), yaml.CSafeLoader))
    found = {body["metadata"]["name"] for body in made}
    for body in made:
        if body["kind"] == "StatefulSet":
            pod = f"{body['metadata']['name']}-0"
            claims = (claim["metadata"]["name"] for claim in body["spec"]["volumeClaimTemplates"])
            found |= {pod, *(f"{claim}-{pod}" for claim in claims)}
    return found


@pytest.mark.parametrize("path", ON_CLUSTERS, ids=ids)
def test_kubectl_commands_name_objects_of_the_release(path: Path, names: set[str]) -> None:
    for line in [*commands(path), *spans(path)]:
        if "kubectl" in line:
            for name in re.findall(r"(?:data-)?\bpaceline-[a-z0-9-]*[a-z0-9]\b(?!-)", line):
                assert name in names, f"{line}: the release has no {name}"
