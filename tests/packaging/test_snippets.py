"""Snippets of the docs work: Python runs, job files are accepted, pages of steps are followed.

A block is left out by a comment `<!-- not run: REASON -->` in the line before it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from paceline.config import JobSpec, service
from paceline_harness.documents.snippets import Snippet, is_session, snippets
from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "paceline"
EXAMPLE = ROOT / "examples" / "plugins"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
ALL = [each for page in PAGES for each in snippets(page)]
JOB = {
    "name": "page",
    "model": {"path": "models/arithmetic"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}
# By their only field: files of `paceline up --pools`, `--worlds` and the like.
SETTINGS: dict[str, type[BaseModel]] = {
    field: model
    for name, model in vars(service).items()
    if name.endswith("File") and len(model.model_fields) == 1
    for field in model.model_fields
}
# What a page trains with, instead of the sizes of its job file: two steps say all that many do.
SMALL = (
    "--set stop.steps=2 --set eval.tasks=4 "
    "--set experience.batch_groups=2 --set experience.group_size=4"
)
# A random model that reads and writes any letter, for pages whose questions are sentences.
LETTERS = """
import json, string, sys
from pathlib import Path
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
names = ["<pad>", "<eos>", *string.printable]
tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens(["<pad>", "<eos>"])
tokenizer.save(str(folder / "tokenizer.json"))
settings = {"eos_token": "<eos>", "pad_token": "<pad>"}
settings["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}"
(folder / "tokenizer_config.json").write_text(json.dumps(settings))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=None, eos_token_id=1, tie_word_embeddings=True,
)
LlamaForCausalLM(config).save_pretrained(folder)
"""
PROBLEMS = """
import sys, json
from paceline.config import resolve_job
from paceline.config.named import problems
from paceline.errors import PacelineError
for number, job in enumerate(json.load(sys.stdin)):
    try:
        lines = [*problems(resolve_job(job))]
    except PacelineError as error:
        lines = [error.message]
    for line in lines:
        print(number, line)
"""


def where(value: Any) -> str | None:
    if isinstance(value, Snippet):
        return f"{value.page.relative_to(ROOT)}:{value.line}"
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def of(*languages: str) -> list[Snippet]:
    return [each for each in ALL if each.language in languages]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, forks: None) -> dict[str, str]:
    """Variables of a process that finds the example plug-ins, as if they were installed."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "paceline_example_plugins-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: paceline-example-plugins\nVersion: 0\n")
    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(folder), str(EXAMPLE / "src"), str(ROOT / "tests" / "support")]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited])}


def said_by(
    command: list[str], environment: dict[str, str], *, stdin: str = "", cwd: Path | None = None
) -> str:
    """The output of a command; one that takes too long is stopped with what it has started."""
    with subprocess.Popen(
        command,
        env=environment,
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(stdin, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    assert process.returncode == 0, told[-4000:]
    return told


def test_python_runs(environment: dict[str, str]) -> None:
    pages = sorted({str(each.page) for each in of("python")})
    assert len(pages) > 20
    # All are run, whatever fails.
    said_by([sys.executable, "-m", "paceline_harness.documents.run_python", *pages], environment)


@pytest.mark.parametrize("block", of("json", "jsonl", "toml"), ids=where)
def test_data_can_be_parsed(block: Snippet) -> None:
    if block.language == "toml":
        assert tomllib.loads(block.body)
        return
    for text in block.body.splitlines() if block.language == "jsonl" else [block.body]:
        assert json.loads(text)


def chart_values(values: dict[str, Any]) -> None:
    """Check values of the chart; sections of which only a part is given have the chart's own."""
    defaults = yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(merged(defaults, values), schema)


def merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def is_job(block: Snippet) -> bool:
    """Whether a block is a job file or a part of one; a first line may say what it is."""
    return not block.body.startswith(("# values", "# paceline up")) and (
        {*yaml.load(block.body, yaml.CSafeLoader)} <= {*JobSpec.model_fields}
    )


def checked(language: str) -> list[Snippet]:
    return [each for each in of(language) if not each.not_run]


@pytest.mark.parametrize("block", [b for b in checked("yaml") if not is_job(b)], ids=where)
def test_settings_and_values_are_accepted(block: Snippet) -> None:
    content = yaml.load(block.body, yaml.CSafeLoader)
    (first, *others) = content
    if first in SETTINGS and not others:
        SETTINGS[first].model_validate(content)
    else:
        chart_values(content)


def in_lines(page: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of job files with their values, as text has them: `rollout.engine: {kind: torch}`."""
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        match = re.fullmatch(r"([a-z_.]+): (.+)", span)
        if match and match[1].partition(".")[0] in JobSpec.model_fields:
            value = yaml.load(match[2], yaml.CSafeLoader)
            for key in reversed(match[1].split(".")):
                value = {key: value}
            yield f"{where(page)}: {span}", value


def problems_of(jobs: list[tuple[str, dict[str, Any]]], environment: dict[str, str]) -> list[str]:
    """What `paceline validate` would refuse; fields that a part of a job lacks are added."""
    whole = [{**JOB, **job} for _, job in jobs]
    told = said_by([sys.executable, "-c", PROBLEMS], environment, stdin=json.dumps(whole))
    return [f"{jobs[int(line.split()[0])][0]}: {line}" for line in told.splitlines()]


def test_job_files_are_accepted(environment: dict[str, str]) -> None:
    blocks = [
        (where(each) or "", yaml.load(each.body, yaml.CSafeLoader)) for each in checked("yaml")
    ]
    jobs = [each for each, block in zip(blocks, checked("yaml"), strict=True) if is_job(block)]
    assert len(jobs) > 30
    assert problems_of(jobs, environment) == []


def test_fields_and_values_in_comparisons_are_accepted(environment: dict[str, str]) -> None:
    jobs = [*in_lines(ROOT / "docs" / "coming-from.md")]
    assert len(jobs) > 40
    wrong = ("wrong", {"trainer": {"objective": {"surrogate": "clip"}}})
    (found,) = problems_of([*jobs, wrong], environment)
    assert found.startswith("wrong: ")
    assert "clip" in found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if is_session(page)], ids=where)
def test_pages_of_steps_can_be_followed(page: Path, forks: None, tmp_path: Path) -> None:
    """The model is a tiny one, the training small, and the commands are of this environment."""
    # Services can be forked in it, without plug-ins of examples; its last run is that of the page.
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    model = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"  # preferred to the hub
    said_by([sys.executable, "-c", LETTERS, str(model)], environment)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    program(programs / "python", f'exec {sys.executable} "$@"')
    command = f'exec {sys.executable} -m paceline.front.cli "$@"'
    program(programs / "paceline", f'case $1 in run) set -- "$@" {SMALL} ;; esac\n{command}')
    for block in snippets(page):
        if block.file and not block.not_run:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body)
        elif block.language == "sh" and not block.not_run:
            said_by(["bash", "-euo", "pipefail", "-c", block.body], environment, cwd=tmp_path)
    for path in tmp_path.glob("runs/*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {*history_values()} <= {name for line in lines for name in line}


def history_values() -> list[str]:
    """Names in the table of the troubleshooting page that lists values of the history."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = text.partition("| value | meaning |\n")[2].partition("\n\n")[0]
    found = [
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row[: row.index("|", 1)])
    ]
    assert len(found) > 20
    return found


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_is_not_run_says_why() -> None:
    for each in ALL:
        assert not each.not_run or len(each.not_run.split()) >= 2, where(each)


def test_a_wrong_snippet_is_noticed(environment: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`a/b.py`:\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    first, second = snippets(page)
    assert (first.file, first.line, second.file, second.line) == ("a/b.py", 4, "", 8)
    command = [sys.executable, "-m", "paceline_harness.documents.run_python", str(page)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, "line 8" in done.stderr) == (1, True)
