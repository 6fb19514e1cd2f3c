import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from paceline.enums import Purpose
from paceline.errors import InvalidError
from paceline.front.cli.check import read_job
from paceline.front.cli.entry import main
from paceline.front.cli.local import difference
from paceline.front.cli.replay import requests_of
from paceline.front.cli.report import by_eval, curve, draw_rewards, read_metrics, smooth
from paceline.front.local.ports import USUAL_PORT, is_free
from paceline_harness.models.folders import write_readable_model
from paceline_harness.patience import PATIENCE_S

COMMANDS = [
    "run",
    "sweep",
    "up",
    "recipes",
    "submit",
    "list",
    "watch",
    "logs",
    "cancel",
    "verify",
    "weights",
    "validate",
    "plugins",
    "doctor",
]
SPEC = {
    "name": "a",
    "model": {"path": "model"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}


def started(*words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The command as users start it; some commands of each group are tested so."""
    command = [sys.executable, "-m", "paceline.front.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd)


def paceline(*words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The command in this process, as a new one costs a second of a processor.

    Not for what starts services, which sets up logs and handles signals for good.
    """
    handler = signal.getsignal(signal.SIGTERM)
    with (
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            code = main([*words])
        finally:
            signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


@contextmanager
def heard(port: int = 0) -> Generator[tuple[str, list[str]]]:
    """A server that refuses all callers and records their credentials."""
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("authorization", ""))
            self.send_error(401)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", tokens
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have runs of their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file next to a folder with all of a model but weights."""
    (tmp_path / "model").mkdir()
    write_readable_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(SPEC))
    return tmp_path / "job.yaml"


def test_help_names_all_commands_and_exit_codes() -> None:
    found = started("--help")
    assert found.returncode == 0
    assert all(f"    {command} " in found.stdout for command in COMMANDS)
    assert "ledger is inconsistent" in found.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from paceline.front.cli.entry import parser; parser().format_help(); "
        "print(sorted({'grpc', 'pydantic', 'rich', 'httpx', 'psutil'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_validate_accepts_a_good_job(job: Path) -> None:
    found = started("validate", "job.yaml", cwd=job.parent)
    assert (found.returncode, found.stdout) == (0, "job.yaml: ok\n")


def test_a_resolved_job_is_the_same_without_its_recipe(job: Path) -> None:
    found = paceline(
        "validate", "job.yaml", "--set", "recipe=[m2po, kl]", "--resolved", cwd=job.parent
    )
    assert found.stdout.startswith("# recipe: m2po, kl\n")
    (job.parent / "resolved.yaml").write_text(found.stdout)
    again = paceline("validate", "resolved.yaml", "--resolved", cwd=job.parent)
    assert "kind: m2po" in again.stdout
    assert again.stdout == found.stdout.partition("\n")[2]


def test_recipes_are_listed_and_shown(tmp_path: Path) -> None:
    listed = paceline("recipes", cwd=tmp_path)
    assert "\nm2po  " in listed.stdout
    assert "(arXiv 2510.01161, section 4)" in listed.stdout
    shown = paceline("recipes", "show", "m2po", cwd=tmp_path)
    assert "corrections: [{kind: m2po, tau: 0.04}]" in shown.stdout
    wrong = started("recipes", "show", "m2pp", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "paceline: recipe: 'm2pp' is not installed; did you mean 'm2po'?\n",
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "nonsense=1",
            "nonsense: unknown field; allowed here: code, data, eval, evals, experience",
        ),
        ("stop.steps=many", "stop.steps: Input should be a valid integer"),
        ("model.path=nowhere", "model.path: nowhere is not a folder"),
        ("tasks.environment=chess", "tasks.environment: 'chess' is not installed"),
        ("reward=[{kind: beauty}]", "reward.0.kind: 'beauty' is not installed"),
        (
            "reward=[{kind: judge, model: m, endpoint: 'http://x/v1'}]",
            "reward.0.endpoint: is the name",
        ),
        ("experience.group_size=1", "experience.group_size: 1 with advantage 'grpo'"),
        ("experience.max_staleness=-1", "experience.max_staleness: Input should be greater"),
        ("novalue", "--set novalue: write FIELD=VALUE"),
    ],
)
def test_validate_names_what_is_wrong(job: Path, override: str, text: str) -> None:
    found = paceline("validate", "job.yaml", "--set", override, cwd=job.parent)
    assert found.returncode == 2
    assert text in found.stderr


def test_a_judge_that_is_not_among_the_endpoints(job: Path) -> None:
    (job.parent / "e.yaml").write_text("endpoints: {local: {base_url: 'http://127.0.0.1:9/v1'}}")
    judge = ("--set", "reward=[{kind: judge, model: m, endpoint: locl}]")
    for given, says in (
        (("--endpoints", "e.yaml"), "'locl' is not one of `endpoints` in e.yaml; there: local"),
        ((), "'locl' is not one of `endpoints` in a file for --endpoints"),
    ):
        found = paceline("try", "job.yaml", *judge, *given, cwd=job.parent)
        assert (found.returncode, found.stderr) == (2, f"paceline: reward.0.endpoint: {says}\n")


def test_a_model_without_tokenizer(job: Path) -> None:
    (job.parent / "model" / "tokenizer.json").unlink()
    found = paceline("run", "job.yaml", cwd=job.parent)
    assert found.returncode == 2
    assert "has no tokenizer.json" in found.stderr
    assert not (job.parent / "runs").exists()


@pytest.fixture
def again(job: Path) -> Callable[[str], list[str]]:
    """A command that runs the job where one ended before, in a given state."""

    def words(state: str) -> list[str]:
        folder = job.parent / "done" / "jobs" / "a-1"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"state": state}))
        # The store rejects this URL, but only after the run directory has been checked.
        return ["run", "job.yaml", "--run-dir", "done", "--port", "0", "--store", "none://"]

    return words


DONE = "done has the results of job a-1, which has succeeded; choose another --run-dir, or"


def test_a_finished_run_directory_is_not_trained_in_again(
    job: Path, again: Callable[[str], list[str]]
) -> None:
    words = again("succeeded")
    found = paceline(*words, cwd=job.parent)
    assert (found.returncode, DONE in found.stderr) == (2, True)
    assert DONE not in started(*words, "--again", cwd=job.parent).stderr


def test_a_run_directory_whose_job_was_cancelled_is_trained_in_again(
    job: Path, again: Callable[[str], list[str]]
) -> None:
    found = started(*again("cancelled"), cwd=job.parent)
    assert found.returncode != 2
    assert DONE not in found.stderr


def test_a_missing_file() -> None:
    found = paceline("run", "nowhere.yaml")
    assert (found.returncode, found.stderr) == (2, "paceline: nowhere.yaml: no such file\n")


def test_no_gateway(job: Path) -> None:
    for words in (["list"], ["submit", "job.yaml"], ["cancel", "a-1"], ["watch", "a-1"]):
        found = paceline(*words, "--url", "http://127.0.0.1:1", cwd=job.parent)
        assert found.returncode == 3
        assert "cannot reach http://127.0.0.1:1" in found.stderr


def test_the_gateway_of_a_run_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text('{"http": "http://127.0.0.1:2"}')
    found = paceline("list", "--run-dir", str(tmp_path))
    assert "cannot reach http://127.0.0.1:2" in found.stderr


def test_the_gateway_and_the_token_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_URL", "http://127.0.0.1:3")
    assert "cannot reach http://127.0.0.1:3" in paceline("list").stderr
    (tmp_path / "gateway.json").write_text('{"http": "http://127.0.0.1:2"}')
    assert "http://127.0.0.1:2" in paceline("list", "--run-dir", str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("option", "text"),
    [("--token-file", "No such file or directory"), ("--ca", "no such file")],
)
def test_a_missing_token_or_authority(option: str, text: str) -> None:
    found = paceline("list", option, "nowhere")
    assert found.returncode == 2
    assert found.stderr == f"paceline: {option} nowhere: {text}\n"


def test_the_token_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "from-variable")
    (tmp_path / "token").write_text("from-file\n")
    with heard() as (url, tokens):
        started("list", "--url", url)
        paceline("list", "--url", url, "--token-file", str(tmp_path / "token"))
    assert tokens == ["Bearer from-variable", "Bearer from-file"]


def test_the_token_of_a_run_directory_goes_to_its_gateway_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-run\n")
    with heard() as (url, tokens):
        (tmp_path / "gateway.json").write_text(json.dumps({"http": url}))
        paceline("list", "--run-dir", str(tmp_path))
        paceline("list", "--run-dir", str(tmp_path), "--url", url)
    assert tokens == ["Bearer of-the-run", ""]


def test_a_stranger_at_the_usual_port_is_neither_asked_nor_shown_a_token(tmp_path: Path) -> None:
    (tmp_path / "runs" / "local").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "runs" / "local"):
        (folder / "token").write_text("of-the-run\n")
    if not is_free(USUAL_PORT):
        pytest.skip(f"port {USUAL_PORT} is taken, so that what is sent to it cannot be heard")
    with heard(USUAL_PORT) as (_, tokens):
        named = paceline("list", "--run-dir", ".", cwd=tmp_path)
        paceline("list", cwd=tmp_path)
    assert tokens == [""]  # of the second, which names no installation
    assert named.returncode == 3
    assert "--run-dir .: no gateway runs there; start one with `paceline up" in named.stderr


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        found = started("up", "--run-dir", str(tmp_path), "--port", port)
    assert found.returncode == 3
    assert f"port {port} on 127.0.0.1 is in use" in found.stderr


def test_store_unreachable(tmp_path: Path) -> None:
    words = ["up", "--run-dir", str(tmp_path), "--port=0", "--store", "redis://127.0.0.1:1"]
    found = started(*words)
    assert found.returncode == 3
    assert "store redis://127.0.0.1:1 cannot be reached" in found.stderr


def test_a_run_takes_another_port_if_the_usual_one_is_in_use(job: Path) -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # it is in use already
            other.bind(("127.0.0.1", 8300))
            other.listen()
        found = started("run", "job.yaml", "--store", "redis://127.0.0.1:1", cwd=job.parent)
    assert found.returncode == 3
    assert "store redis://127.0.0.1:1 cannot be reached" in found.stderr


def test_logs(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "reward-0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    words = ["logs", "--run-dir", str(tmp_path)]
    assert paceline(*words).stdout == "reward-0\n"
    assert paceline(*words, "reward-0", "-n", "2").stdout == "line 98\nline 99\n"
    found = started(*words, "nobody")
    assert (found.returncode, "no logs of 'nobody'" in found.stderr) == (2, True)


@pytest.fixture
def following(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("begin\n")
    words = ["logs", "a", "-f", "--run-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.front.cli", *words], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def test_logs_follow_and_end_with_130_when_interrupted(
    following: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    assert following.stdout is not None
    assert following.stdout.readline() == "begin\n"
    with (tmp_path / "logs" / "a.log").open("a") as handle:
        handle.write("more\n")
    assert following.stdout.readline() == "more\n"
    os.kill(following.pid, signal.SIGTERM)
    assert following.wait(timeout=PATIENCE_S) == 130


def test_a_model_folder_becomes_absolute(job: Path) -> None:
    with contextlib.chdir(job.parent):
        spec = read_job(Path("job.yaml"), ["trainer.optimizer.lr=1e-4"])
    assert spec.model.path == str((job.parent / "model").resolve())
    assert spec.trainer.optimizer.lr == 1e-4
    with pytest.raises(InvalidError):
        read_job(job, ["=1"])


def test_lines_that_cannot_be_imported_are_refused_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "collected.jsonl"
    separated = '{"a": "\u2028\u0085"}'
    long = b"x" * (1 << 20)
    lines = [b"{}", separated.encode(), b"", long, b"\xff", b'"' * (600 << 10), b"{} ", long]
    path.write_bytes(b"\r\n".join(lines))
    (request,) = requests_of(path)
    assert (request.numbers, request.lines) == ([1, 2, 7], ["{}", separated, "{}"])
    assert [each.partition(";")[0] for each in request.problems] == [
        "line 4: is too long",
        "line 5: is not UTF-8 at byte 0",
        "line 6: is too long",  # in a request it takes twice as much
        "line 8: is too long",
    ]
    assert request.renumbered("line 3: is no JSON") == "line 7: is no JSON"
    path.write_bytes(b"[%s]\n" % (b"1" * 1000) * 600)
    found = [*requests_of(path)]
    assert [len(each.lines) for each in found] == [256, 256, 88]
    assert found[-1].numbers[-1] == 600


def test_report(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1, "kind": "train", "values": {"reward_mean": 0.1}}'] * 2
    rows += ['{"step": 1, "kind": "eval", "values": {"reward": 0.2}}']
    rows += [
        '{"step": 1, "kind": "eval", "values": {"set": "b", "reward": 0.4}}',
        '{"step": 2, "ki',
    ]
    path.write_text("\n".join(rows))
    found = read_metrics(path)
    assert len(found) == 4
    assert {name: len(each) for name, each in by_eval(found).items()} == {"": 1, "b": 1}
    assert curve(found, kind=Purpose.TRAIN, name="reward_mean") == ([1], [0.1])
    draw_rewards(found, tmp_path / "reward.png", title="a")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert smooth([1.0, 3.0, 5.0], width=2) == [1.0, 2.0, 4.0]


def test_a_job_that_is_not_resumed_says_what_differs(job: Path) -> None:
    with contextlib.chdir(job.parent):
        stored = read_job(Path("job.yaml"), [])
        other = read_job(Path("job.yaml"), ["trainer.optimizer.lr=1e-4", "sampling.max_tokens=3"])
    said = difference(stored, other)
    assert said == "another sampling.max_tokens, trainer.optimizer.lr makes this a new job"
