"""Rows of every format become the same tasks; what is wrong with a file is said where it is."""

from __future__ import annotations

import codecs
import errno
import gc
import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import Any

import pytest

from paceline.data import JobData, MissingDataError, RowError, RowShape, UnreadError
from paceline.data.errors import answer_of, of_os_error, raise_answer
from paceline.data.readers import MAX_ROW_BYTES
from paceline.environments.dataset.world import observation_of
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline_harness.data import InProcess

ROWS: list[dict[str, Any]] = [
    {"q": f"What is {n} + 1?", "a": [str(n + 1)], "meta": {"level": n % 3, "more": [n, n + 0.5]}}
    for n in range(700)
]
SHAPE = RowShape(columns={"question": "q", "answer": "a.0", "level": "meta.level"})
WITHOUT_LEVEL = RowShape(columns={"question": "q", "answer": "a.0"})
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def data_of(folder: Path, *, make: type[JobData] = InProcess, **options: Any) -> JobData:
    return make(uploaded=str(folder / "data"), cache=str(folder / "cache"), **options)


def rows_of(data: JobData, path: str = "", shape: RowShape = SHAPE) -> list[dict[str, Any]]:
    found = data.rows(path, shape)
    return [found[at] for at in range(len(found))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / ".cache"  # as that of huggingface_hub is
    (found / "data").mkdir(parents=True)
    (found / "data" / ".hidden").mkdir()
    (found / "data" / ".hidden" / "train.jsonl").write_text("no rows")
    return found


def jsonl(folder: Path) -> None:
    # A mark of the encoding, blank lines and other line ends are no rows.
    text = LINES.replace("\n", "\r\n\n", 5)
    (folder / "rows.jsonl").write_bytes(codecs.BOM_UTF8 + text.encode())


def gz(folder: Path) -> None:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))


def zst(folder: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = LINES.index("\n", len(LINES) // 2) + 1
    parts = (LINES[:half].encode(), b"", LINES[half:].encode())  # frames, as of `zstd -T`
    made = zstandard.ZstdCompressor(write_checksum=True)
    skippable = bytes.fromhex("502a4d18 03000000 616263")
    (folder / "rows.jsonl.zst").write_bytes(skippable + b"".join(map(made.compress, parts)))


def parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    (folder / "data").mkdir()
    (folder / "README.md").write_text("as a folder of the Hub")
    for at in range(2):
        part = pyarrow.Table.from_pylist(ROWS[at * 350 : (at + 1) * 350])
        write(part, folder / "data" / f"train-0000{at}-of-00002.parquet", row_group_size=100)


def saved_to_disk(folder: Path) -> None:
    """As `Dataset.save_to_disk` of `datasets` writes it; the order is that of state.json."""
    pyarrow = pytest.importorskip("pyarrow")
    names = ["data-b.arrow", "data-a.arrow"]
    for at, name in enumerate(names):
        part = pyarrow.Table.from_pylist(ROWS[at * 350 : (at + 1) * 350])
        with pyarrow.ipc.new_stream(folder / name, part.schema) as stream:
            stream.write_table(part, max_chunksize=100)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


FORMATS = (jsonl, gz, zst, parquet, saved_to_disk)


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_makes_the_same_tasks_and_splits(
    folder: Path, write: Callable[[Path], None]
) -> None:
    write(folder / "data")
    (folder / "plain.jsonl").write_text(LINES)
    plain = InProcess(uploaded=str(folder / "plain.jsonl"), cache=str(folder / "cache"))
    wanted = [
        {"question": row["q"], "answer": row["a"][0], "level": row["meta"]["level"]} for row in ROWS
    ]
    data = data_of(folder)
    assert rows_of(data) == rows_of(plain) == wanted
    same = data.rows("", SHAPE).heldout(0.3) == plain.rows("", SHAPE).heldout(0.3)
    assert same.all()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"q": "one", "a": ["1"]}\n{"q": "tw', "rows.jsonl: line 2: is not JSON: EOF"),
        (b'{"q": "one" "a": 1}\n', "line 1: is not JSON: expected `,` or `}` at byte 13;"),
        (b'{"q": "one"}\n', "rows.jsonl: line 1: has no column 'a.0'; it has 'q'"),
        (b'{"q": "", "a": ["1"]}\n', "line 1: 'question' is ''; a text or a list of messages"),
        (b'["one"]\n', "line 1: is a list; one object a line is needed"),
        (b"7\n", "line 1: is not an object of columns but 7"),
        (b'[{"q": 1},\n', "line 1: is a list; one object a line is needed"),
        ('{"q": "é", "a": ["1"]}'.encode("latin-1"), "line 1: is not UTF-8 at byte 7"),
        ('{"q": "é"}'.encode("utf-16"), "line 1: is UTF-16; UTF-8 is needed"),
        (b'{"q": "\\ud800", "a": ["1"]}', "line 1: is not JSON"),
        (b'{"q": NaN}', "line 1: is not JSON"),
        (b'{"q": "a", "a": [' + b"9" * 5000 + b"]}", "line 1: is not JSON"),
        (b'{"q": ' + b"[" * 100_000, "line 1: is not JSON"),
        (b"\n\n", "rows.jsonl: has no rows"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(folder: Path, content: bytes, says: str) -> None:
    (folder / "data" / "rows.jsonl").write_bytes(content)
    with pytest.raises(InvalidError) as refused:
        data_of(folder).rows("rows.jsonl", WITHOUT_LEVEL, field="tasks.options.sources.0")
    assert refused.value.message.startswith("tasks.options.sources.0: ")
    assert says in refused.value.message


def test_a_line_of_gigabytes_is_refused_after_its_first_megabyte(folder: Path) -> None:
    path = folder / "data" / "rows.jsonl"
    with path.open("wb") as file:
        file.write(LINES.encode())
        file.write(b'{"q": "')
        file.truncate(5 << 30)  # a sparse file: a line of 5 GB
    with pytest.raises(InvalidError, match=f"line 701: has more than {MAX_ROW_BYTES} bytes"):
        data_of(folder, make=JobData, memory_bytes=1 << 29).rows("", SHAPE)


def test_a_bomb_is_refused_when_its_rows_exceed_the_room_for_them(folder: Path) -> None:
    bomb = gzip.compress(LINES.encode() * 20)
    (folder / "data" / "rows.jsonl.gz").write_bytes(bomb)
    with pytest.raises(InvalidError, match="more than 500000 bytes of rows"):
        data_of(folder, cache_bytes=1_000_000).rows("", SHAPE)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_rows_of_a_file_that_is_cut_off_are_not_lost_silently(folder: Path, suffix: str) -> None:
    {".gz": gz, ".zst": zst}[suffix](folder / "data")
    path = folder / "data" / f"rows.jsonl{suffix}"
    for cut in (1, 5, 1000):
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(InvalidError, match=rf"rows\.jsonl\{suffix}: cannot be decompressed"):
            data_of(folder).rows("", SHAPE)


@pytest.mark.parametrize(("age_s", "is_kept"), [(0.0, False), (3600.0, True)])
def test_two_indexes_that_are_written_at_once_have_room(
    folder: Path, age_s: float, is_kept: bool
) -> None:
    """Each may take half; what a process left that was killed long ago takes none."""
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        (folder / "data" / name).write_bytes(gzip.compress(LINES.encode()))
    data = data_of(folder, cache_bytes=1_000_000)
    first = data.rows("a.jsonl.gz", SHAPE)
    other = folder / "cache" / "new-other"
    other.mkdir()
    began = time.time() - age_s
    os.utime(other, (began, began))
    data.rows("b.jsonl.gz", SHAPE)
    name = data.identity("a.jsonl.gz", SHAPE)
    assert (folder / "cache" / name).is_dir() is is_kept
    assert first[0]["question"] == ROWS[0]["q"]  # open: can be read until it is closed


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    if not name.endswith("gz"):
        pytest.importorskip("zstandard" if name.endswith("zst") else "pyarrow")
    (folder / "data" / name).write_bytes(b"PAR1" + bytes(1000))
    with pytest.raises(InvalidError, match=f"{name}.*(cannot be|no rows)"):
        data_of(folder).rows(name, SHAPE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout_s": 0.01}, "could not be read within"),
        ({"memory_bytes": 1 << 20}, "the process that read it has ended"),
    ],
)
def test_a_process_that_ends_may_be_the_fault_of_file_or_machine(
    folder: Path, options: dict[str, Any], says: str
) -> None:
    (folder / "data" / "rows.jsonl").write_text(LINES)
    with pytest.raises(UnreadError, match=says):
        data_of(folder, make=JobData, **options).rows("", SHAPE)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, MissingDataError),
        (errno.EACCES, MissingDataError),
        (errno.ENOSPC, UnavailableError),
        (errno.ESTALE, UnavailableError),
    ],
)
def test_what_a_disk_says_is_no_fault_of_a_row(number: int, kind: type[PacelineError]) -> None:
    error = of_os_error("rows.jsonl", OSError(number, os.strerror(number)))
    with pytest.raises(kind, match=r"rows\.jsonl: cannot be read: "):
        raise_answer(answer_of(error))  # from the process that reads
    raise_answer([])


def test_reading_ends_with_its_service(folder: Path) -> None:
    data = data_of(folder, make=JobData)
    (folder / "data" / "rows.jsonl").write_text(LINES * 300)
    Timer(0.3, data.stopped.set).start()
    with pytest.raises(UnavailableError, match="about to end"):
        data.rows("", SHAPE)


def test_paths_say_what_else_there_is(folder: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (folder / "data" / name).write_text(LINES)
    data = data_of(folder)
    assert len(data.rows("tr*.jsonl", SHAPE)) == len(data.rows("tr**.jsonl", SHAPE)) == len(ROWS)
    with pytest.raises(InvalidError, match=r"splits test, train; name those of one with a pattern"):
        data.rows("", SHAPE)
    with pytest.raises(MissingDataError, match=r"no such file or folder; there are test\.jsonl"):
        data.rows("trian.jsonl", SHAPE)
    (folder / "data" / "empty").mkdir()  # as the mount point of a volume is
    for empty in ("empty", "empty/*.jsonl"):
        with pytest.raises(MissingDataError, match="has no files of rows"):
            data.rows(empty, SHAPE)
    with pytest.raises(InvalidError, match="NUL"):
        data.rows("a\0b", SHAPE)
    (folder / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidError, match=r"has the splits train, test; name the folder of one"):
        data.rows("", SHAPE)


def test_only_what_comes_with_a_job_and_what_is_allowed_is_read(folder: Path) -> None:
    outside, shared = folder / "secret.jsonl", folder / "shared"
    outside.write_text(LINES)
    shared.mkdir()
    (shared / "rows.jsonl").write_text(LINES)
    os.symlink(outside, shared / "link.jsonl")
    data = data_of(folder, allowed=(str(shared), "s3://team/rows/"))
    assert len(data.rows(str(shared / "rows.jsonl"), SHAPE)) == len(ROWS)
    refused = (str(outside), f"{shared}/../secret.jsonl", str(shared / "link.jsonl"))
    for path in (*refused, "s3://other/rows.jsonl", "s3://team/rows/../../other", "file:///etc"):
        with pytest.raises(InvalidError, match="jobs of this installation may not read it"):
            data.rows(path, SHAPE)
    for path in (str(shared), f"{shared}/l*.jsonl"):
        with pytest.raises(InvalidError, match=r"link\.jsonl: jobs of this installation may not"):
            data.rows(path, SHAPE)
    with pytest.raises(InvalidError, match="outside of the data of the job"):
        data.rows("../secret.jsonl", SHAPE)
    os.symlink(outside, folder / "data" / "link.jsonl")
    with pytest.raises(InvalidError, match="to outside of the data of the job"):
        data.rows("", SHAPE)
    with pytest.raises(InvalidError, match="submit with --data"):
        InProcess(cache=str(folder / "cache")).rows("rows.jsonl", SHAPE)


def test_an_object_store_is_read_by_fsspec(folder: Path) -> None:
    pytest.importorskip("fsspec")
    (folder / "rows.jsonl").write_text(LINES)
    url = f"file://{folder}/rows.jsonl"
    data = data_of(folder, allowed=("file://", "s3://"))
    assert len(data.rows(url, SHAPE)) == len(ROWS)
    (folder / "rows.jsonl").write_text(LINES * 2)  # another object: read again
    assert len(data.rows(url, SHAPE)) == 2 * len(ROWS)
    with pytest.raises(MissingDataError, match=r"file://.*does not exist"):
        data.rows(f"file://{folder}/none.jsonl", SHAPE)
    (folder / "b.jsonl").write_text(LINES)
    both = data.rows(f"file://{folder}/*.jsonl", SHAPE)
    assert [both[0], both[700]] == [both[1400], both[700]]
    assert not [*(folder / "cache").rglob("fetched/b.jsonl")]  # no second copy of what is spooled
    with pytest.raises(InvalidError, match="may only stand for folders"):
        data.rows(f"file://{folder}/**.jsonl", SHAPE)
    for url in ("s3://me:secret@bucket/rows.jsonl", "s3://a/rows.jsonl::file:///etc"):
        with pytest.raises(InvalidError) as refused:
            data.rows(url, SHAPE)
        assert "secret" not in refused.value.message


def test_what_a_store_says_is_no_internal_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings are kept, and errors are those of the packages, as with s3fs."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    errors = ModuleType("botocore.exceptions")  # s3fs is not installed here
    failure = type("NoCredentialsError", (type("BotoCoreError", (Exception,), {}),), {})
    vars(errors)["BotoCoreError"] = failure.__base__
    monkeypatch.setitem(sys.modules, "botocore.exceptions", errors)
    listings = list[str]()

    class Store(memory.MemoryFileSystem):
        protocol = "rowstore"

        def info(self, path: str, **more: Any) -> Any:
            assert listings.pop() == "forgotten"
            raise failure("Unable to locate credentials")

        def invalidate_cache(self, path: str | None = None) -> None:
            listings.append("forgotten")

    fsspec = pytest.importorskip("fsspec")
    fsspec.register_implementation("rowstore", Store, clobber=True)
    data = data_of(folder, allowed=("rowstore://",))
    with pytest.raises(UnavailableError, match="NoCredentialsError: Unable to locate"):
        data.rows("rowstore://bucket/rows.jsonl", SHAPE)


def held_in(folder: Path) -> int:
    """How many files of a folder this process has open; other threads have others."""
    count = 0
    for number in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile
            count += str(folder) in os.readlink(f"/dev/fd/{number}")
    return count


def test_a_folder_of_many_files_takes_few_descriptors(folder: Path) -> None:
    for at in range(300):
        (folder / "data" / f"{at:03}.jsonl").write_text(json.dumps(ROWS[at]) + "\n")
    data, before = data_of(folder), held_in(folder)
    rows, again = data.rows("", SHAPE), data.rows("", SHAPE)
    assert held_in(folder) - before <= 150
    assert [rows[at]["question"] for at in range(300)] == [each["q"] for each in ROWS[:300]]
    assert again[299] == rows[299]
    (folder / "data" / "299.jsonl").unlink()
    with pytest.raises(UnavailableError, match="row 299: cannot be read: No such file"):
        again[299]
    del rows, again
    gc.collect()  # of the error's traceback
    assert held_in(folder) <= before


def test_a_row_that_changes_under_a_running_job_is_refused(folder: Path) -> None:
    path = folder / "data" / "rows.jsonl"
    path.write_text(LINES)
    data = data_of(folder)
    rows = data.rows("", SHAPE)
    path.with_name("new").write_text(LINES.replace("What", "WHAT"))
    os.replace(path.with_name("new"), path)
    assert rows[3]["question"] == "What is 3 + 1?"  # the file that is open is the one before
    again = data.rows("", SHAPE)
    assert again.digest != rows.digest
    with path.open("r+b") as file:  # in place
        file.seek(LINES.index("\n") + 10)
        file.write(b"x")
    assert again[0]["question"] == "WHAT is 0 + 1?"
    with pytest.raises(InvalidError, match="row 1 has changed since it was read at submit"):
        again[1]


def test_prompts_are_templates_texts_or_messages() -> None:
    user = {"role": "user", "content": "2+2?"}
    row = {"prompt": [user, {"role": "assistant", "content": "4"}], "extra": {"x": 1}}
    assert RowShape().payload(row) == {"messages": [user], "answer": "4", "extra": {"x": 1}}
    parts = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]}
    assert RowShape().payload(parts)["messages"] == [user]
    shape = RowShape(template="{{x}} \\frac{1}{2} {a.b}: {list} {q}", columns={})
    filled = shape.payload({"a": {"b": "{q}"}, "list": [1, "é"], "q": "?"})
    assert filled["question"] == '{x} \\frac{1}{2} {q}: [1, "é"] ?'
    dialogue = [user, {"role": "assistant", "content": "4"}]
    ultrachat: dict[str, Any] = {"prompt": "2+2?", "messages": dialogue, "id": 1}
    assert observation_of(RowShape().payload(ultrachat)).text == "2+2?"
    shape = RowShape(template="Q{id}")
    assert observation_of(shape.payload({"messages": [None], "id": 1})).text == "Q1"
    assert RowShape().payload({"question": None, "messages": dialogue}) == {
        "messages": [user],
        "answer": "4",
    }
    other = {"messages": [user, {"role": "assistant", "content": "four"}]}  # the same question
    assert RowShape().checked(other) == RowShape().checked({"messages": dialogue})
    for wrong in ({"prompt": [{"role": "robot", "content": ""}]}, {"prompt": 7}, {"text": "a"}):
        with pytest.raises(RowError):
            RowShape().payload(wrong)
    long = RowShape(template="{q}" * 10_000)
    with pytest.raises(RowError, match="makes a prompt of"):
        long.payload({"q": "x" * 1000})
