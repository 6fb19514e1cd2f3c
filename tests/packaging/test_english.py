"""`dev/english.py`: words that docstrings do not begin with, and names that say nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "english.py"
NONE: dict[str, dict[str, int]] = {}
ROOM = "services/paceline_gateway/http"


def tree(
    root: Path, text: str, *, allowed: dict[str, dict[str, int]] = NONE, room: str = ROOM
) -> Path:
    """A tree with one module, and the numbers that it is allowed."""
    (root / room).mkdir(parents=True)
    (root / room / "module.py").write_text(text)
    (root / "dev").mkdir()
    (root / "dev" / "english.json").write_text(json.dumps(allowed))
    return root


def run(root: Path, *options: str) -> tuple[int, list[str]]:
    """The exit code of a check, and its lines."""
    command = [sys.executable, str(SCRIPT), "--root", str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("word", ["Those", "Of", "As", "What", "What,", "Of:"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""{} a job."""\n', 1),
        ('class Job:\n    """{} a job."""\n', 1),
        ('\n\ndef job() -> None:\n    """{} a job."""\n', 3),
        ('class Job:\n    async def run(self) -> None:\n        """{} a job."""\n', 2),
    ],
)
def test_a_docstring_without_a_subject_is_refused(
    tmp_path: Path, word: str, text: str, line: int
) -> None:
    code, lines = run(tree(tmp_path, text.format(word)))

    assert code == 1
    assert lines == [
        f"{ROOM}/module.py:{line}: {word} a job.: begin with the noun",
        f"{ROOM}: 1 docstrings; at most 0",
    ]


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("found = 1\n", 1, "found"),
        ("def run() -> None:\n    made = 1\n    made = 2\n", 1, "made"),
        ("\ndef run() -> None:\n    for told, _ in []:\n        pass\n", 2, "told"),
        ("def run() -> list[int]:\n    return [each for each in ()]\n", 1, "each"),
        ("def run() -> None:\n    if given := 1:\n        pass\n", 1, "given"),
        ("class Job:\n    def _told(self) -> None: ...\n", 2, "_told"),
        ("async def _gone() -> None: ...\n", 1, "_gone"),
    ],
)
def test_a_name_that_does_not_say_what_it_holds_is_refused(
    tmp_path: Path, text: str, line: int, name: str
) -> None:
    code, lines = run(tree(tmp_path, text))

    assert code == 1
    assert lines[0] == f"{ROOM}/module.py:{line}: {name}: say what it holds"
    assert lines[1:] == [f"{ROOM}: 1 names; at most 0"]


@pytest.mark.parametrize(
    "text",
    [
        '"""Officers, assets and whatever they are."""\n',
        '"""The job. Of it."""\n',
        "def run(found: int) -> int:\n    return found\n",
        "def told() -> None: ...\n",
        "x = dict(each=1)\n",
        "founder = 1\n",
        "",
    ],
)
def test_other_words_and_names_may_be_used(tmp_path: Path, text: str) -> None:
    assert run(tree(tmp_path, text)) == (0, [])


def test_generated_modules_are_left_alone(tmp_path: Path) -> None:
    room = "shared/paceline/v1"

    assert run(tree(tmp_path, '"""What it says."""\nfound = 1\n', room=room)) == (0, [])


def test_a_folder_may_keep_what_it_has_and_its_subfolders_count_with_it(tmp_path: Path) -> None:
    text = '"""What it says."""\nfound = 1\nmade = 2\n'
    allowed = {ROOM: {"docstrings": 1, "names": 2}}
    root = tree(tmp_path, text, allowed=allowed, room=f"{ROOM}/routes")

    assert run(root) == (0, [])


def test_numbers_have_to_follow_what_was_mended(tmp_path: Path) -> None:
    root = tree(tmp_path, "found = 1\n", allowed={ROOM: {"names": 2}})

    code, lines = run(root)

    assert code == 1
    assert lines == [f"{ROOM}: 1 names, not 2; run python dev/english.py --write"]
    assert run(root, "--write") == (0, [])
    assert json.loads((root / "dev" / "english.json").read_text()) == {ROOM: {"names": 1}}
    assert run(root) == (0, [])


def test_numbers_move_with_a_folder(tmp_path: Path) -> None:
    root = tree(tmp_path, "found = 1\n", allowed={"shared/paceline/front": {"names": 1}})

    assert run(root)[0] == 1
    assert run(root, "--write") == (0, [])
    assert run(root) == (0, [])


def test_more_cannot_be_written(tmp_path: Path) -> None:
    root = tree(tmp_path, "found = 1\nmade = 2\n", allowed={ROOM: {"names": 1}})

    code, lines = run(root, "--write")

    assert code == 1
    assert lines == [f"{root / 'dev' / 'english.json'}: 2 lapses in all; at most 1"]
    assert json.loads((root / "dev" / "english.json").read_text()) == {ROOM: {"names": 1}}
