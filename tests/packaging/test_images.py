"""The Dockerfiles and the compose file; `make image-check` builds them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline import __version__
from paceline.config.load import validate
from paceline.config.service import ControllerOptions, ExperienceOptions, GatewayOptions
from paceline.enums import WorkerKind
from paceline.platform.transport.service_keys import SPEAKS_FOR, ServiceKeys, read_keys
from paceline_harness.installations.compose import composition, settings_in_compose
from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
FILES = sorted(DOCKER.glob("*.Dockerfile"))
LIGHT = {"gateway", "controller", "environment", "reward", "experience"}
OPTIONS = {
    "experience": ExperienceOptions,
    "gateway": GatewayOptions,
    "controller": ControllerOptions,
}
SECRETS = {"STORE_PASSWORD": "0123abcd", "TOKEN": "4567cdef"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Keyword and the rest of every instruction, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    pairs = (line.split(None, 1) for line in lines if line.strip())
    return [(pair[0], pair[1]) for pair in pairs]


def last_stage(path: Path) -> list[tuple[str, str]]:
    """The instructions from the last FROM on."""
    found = instructions(path)
    start = max(i for i, (keyword, _) in enumerate(found) if keyword == "FROM")
    return found[start:]


def said(stage: list[tuple[str, str]], keyword: str) -> list[str]:
    """Every instruction of this kind, without its keyword."""
    return [rest for found, rest in stage if found == keyword]


def name_of(path: Path) -> str:
    return path.name.removesuffix(".Dockerfile")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_linter_finds_nothing(path: Path) -> None:
    done = subprocess.run(
        [BIN / "hadolint", path], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /tmp && sudo pip install x\n")
    done = subprocess.run(
        [BIN / "hadolint", bad], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "DL3006" in done.stdout


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_bases_are_pinned_by_a_tag(path: Path) -> None:
    found = instructions(path)
    bases = [rest.partition("=")[2] for _, rest in found if re.match(r"(BUILD_)?BASE=", rest)]
    assert bases
    for base in bases:
        assert re.search(r":v?\d+\.\d+", base), f"{base} is not pinned"
    assert all(rest.startswith("${") for keyword, rest in found if keyword == "FROM")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_images_run_as_a_numeric_user_and_define_no_probes(path: Path) -> None:
    stage = last_stage(path)
    users = said(stage, "USER")
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    assert not said(stage, "HEALTHCHECK")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_images_import_nothing_from_where_they_start_and_list_what_is_in_them(path: Path) -> None:
    (environment,) = said(last_stage(path), "ENV")
    assert "PYTHONSAFEPATH=1" in environment.split()
    runs = " ".join(said(instructions(path), "RUN"))
    assert "--output-file /opt/paceline/sbom.cdx.json /opt/paceline/bin/python" in " ".join(
        runs.split()
    )


def test_versions_are_those_that_were_tested() -> None:
    pinned = (DOCKER / "sglang-cpu.txt").read_text() + (ROOT / "constraints.txt").read_text()
    sglang = re.search(r"^sglang==(.*)$", pinned, re.MULTILINE)
    torch = re.search(r"^torch==(.*)$", pinned, re.MULTILINE)
    assert sglang
    assert torch
    assert f"sglang:v{sglang[1]}\n" in (DOCKER / "rollout.Dockerfile").read_text()
    assert f"pytorch:{torch[1]}-" in (DOCKER / "trainer.Dockerfile").read_text()


@pytest.mark.parametrize("service", [*sorted(LIGHT), "trainer", "rollout", "local"])
def test_make_builds_every_image_from_its_recipe(service: str) -> None:
    command = ["make", "-n", f"image-{service}", "IMAGE_TOOL=docker", "IMAGE_PREFIX=r.example/p-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    recipe = {"trainer": "trainer", "local": "trainer", "rollout": "rollout"}.get(
        service, "service"
    )
    assert f"docker/{recipe}.Dockerfile" in done.stdout
    assert f"--build-arg SERVICE={service} " in done.stdout
    assert f"--tag r.example/p-{service}:{__version__} ." in done.stdout


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compositions_follow_their_schema(name: str) -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_composition_runs_images_that_make_builds() -> None:
    ours = {name: entry for name, entry in composition()["services"].items() if name != "store"}
    assert set(ours) == {"keys", "experience", "gateway", "controller"}
    assert ours.pop("keys")["image"] == ours["gateway"]["image"]
    for name, entry in ours.items():
        image = "local" if name == "controller" else name
        assert (
            entry["image"] == f"${{IMAGE_PREFIX:-paceline-}}{image}:${{IMAGE_TAG:-{__version__}}}"
        )
        assert entry["command"][0] == f"paceline_{name}"
    assert re.search(r":\d+\.\d+$", composition()["services"]["store"]["image"])


def test_the_composition_has_no_password_of_its_own() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for variable in SECRETS:
        assert f"${{{variable}:?" in text
        assert f"${{{variable}:-" not in text
    assert "requirepass ${STORE_PASSWORD:?" in composition()["configs"]["valkey"]["content"]


def test_the_composition_is_closed_and_ordered() -> None:
    found = composition()
    for name, entry in found["services"].items():
        assert entry["read_only"], name
        assert entry["cap_drop"] == ["ALL"], name
        assert entry["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "pid", "ipc", "cap_add", "devices"} & entry.keys()
        assert entry.get("network_mode", "none") == "none", name
        waits = entry.get("depends_on", {})
        # With another condition `up --wait` would take the end of what runs once for a failure.
        once = {"keys": "service_completed_successfully"}
        assert all(on["condition"] == once.get(of, "service_healthy") for of, on in waits.items())
        assert name in {"store", "keys"} or {*waits} > {"keys"}
        assert name == "keys" or entry["healthcheck"]["test"], name
        named = [volume.partition(":")[0] for volume in entry["volumes"]]
        assert all(volume in found["volumes"] or volume.startswith("${") for volume in named)
        assert all(port.startswith("127.0.0.1:") for port in entry.get("ports", ()))


def test_each_container_has_its_own_keys_and_nothing_else_of_them(tmp_path: Path) -> None:
    """What runs once writes them where each service reads its own, below volumes of its own."""
    entry = composition()["services"]["keys"]
    module, folder = entry["command"]
    root = tmp_path / "keys"
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, root], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    secret = (root / "secret").read_text().strip()
    assert all(path.stat().st_mode & 0o077 == 0 for path in root.rglob("*") if path.is_file())
    mounted = {target: volume for volume, target in map(split_mount, entry["volumes"])}
    for name in OPTIONS:
        content = yaml.safe_load(
            re.sub(r"\$\{[^}]*\}", "1", composition()["configs"][name]["content"])
        )
        path = Path(content["service_keys"])
        keys = [
            (volume, target)
            for volume, target in map(split_mount, composition()["services"][name]["volumes"])
            if volume.startswith("keys")
        ]
        assert keys == [(f"keys-{name}", str(path.parent))]
        assert mounted[str(path.parent)] == f"keys-{name}"
        written = read_keys(root / path.relative_to(folder))
        assert set(written.keys) == SPEAKS_FOR.get(WorkerKind(name), {WorkerKind(name)})
        assert written == ServiceKeys.of_installation(secret).narrowed(written.keys)
    for recipe in ("service", "trainer"):
        made = " ".join(said(last_stage(DOCKER / f"{recipe}.Dockerfile"), "RUN")).split()
        assert {folder, *(f"{folder}/{name}" for name in OPTIONS)} <= set(made)


def split_mount(mount: str) -> tuple[str, str]:
    """The volume and the path of a mount."""
    volume, target, *_ = mount.split(":")
    return volume, target


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_composition_starts_services_with_settings_that_they_take(
    tmp_path: Path, name: str
) -> None:
    settings = settings_in_compose(name, tmp_path, SECRETS)
    validate(OPTIONS[name], settings.options)
    assert settings.kind is WorkerKind(name)
    assert (settings.port, settings.metrics_port) == (8400, 8401)
    assert settings.store_url == ("redis://:0123abcd@store:6379/0" if name == "experience" else "")
    assert settings.token == ("4567cdef" if name == "gateway" else "")
    assert settings.plugins.allowed == ()
    assert settings.service_keys is not None
    assert not settings.insecure
    if name == "experience":
        assert validate(ExperienceOptions, settings.options).data_folders == ()
