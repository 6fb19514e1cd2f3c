"""What wheels say of themselves, whatever bytes they are."""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.isolation.code.members import SMALLEST_BYTES
from paceline.isolation.code.wheels.wheel import WheelError, WheelMetadata, WheelName, read_wheel
from paceline_harness.packages.wheels import write_wheel

NAME = WheelName.parse("leaf-1.0-py3-none-any.whl")
INFO = "leaf-1.0.dist-info"


@pytest.mark.parametrize(
    "file",
    [
        "leaf.whl",
        "leaf-1.0.tar.gz",
        "leaf-x-py3-none-any.whl",
        "le af-1.0-py3-none-any.whl",
        ".whl",
    ],
)
def test_other_names_are_refused(file: str) -> None:
    with pytest.raises(WheelError, match="no name of a wheel"):
        WheelName.parse(file)


def test_a_wheel_says_what_it_needs_and_how_large_it_is(tmp_path: Path) -> None:
    path = write_wheel(
        tmp_path, "leaf", requires=("a>=1", 'b; extra == "x"'), fields=("Requires-Python: >=3.8",)
    )
    metadata, num_bytes = read_wheel(path, NAME, most_bytes=1 << 20)
    assert [str(each) for each in metadata.requires] == ["a>=1", 'b; extra == "x"']
    assert str(metadata.requires_python) == ">=3.8"
    assert num_bytes == 6 * SMALLEST_BYTES  # small files, their folder and the one around it


@given(st.binary(max_size=300))
def test_any_metadata_is_understood_or_refused(content: bytes) -> None:
    for head in (b"", b"Name: leaf\nVersion: 1.0\nRequires-Dist: "):
        with contextlib.suppress(WheelError):
            metadata = WheelMetadata.parse(head + content, NAME)
            assert not [each for each in metadata.requires if each.url]


@given(st.text(max_size=60))
def test_no_address_gets_through(text: str) -> None:
    lines = f"Name: leaf\nVersion: 1.0\nRequires-Dist: evil @ {text}\n"
    with pytest.raises(WheelError):
        WheelMetadata.parse(lines.encode("utf-8", "replace"), NAME)


MEMBERS = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(
                [f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD", "leaf.py", "../leaf", "/x"]
            ),
            # `zipfile` writes none of what follows a zero.
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=10),
        ),
        st.sampled_from([b"", b"Name: leaf\nVersion: 1.0\n"]),
    ),
    max_size=6,
)


@given(MEMBERS, st.integers(0, 400), st.binary(max_size=3))
def test_any_archive_is_read_or_refused(
    members: list[tuple[str, bytes]], at: int, changed: bytes
) -> None:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as wheel:
        warnings.simplefilter("ignore")
        for name, content in members:
            wheel.writestr(name, content)
    content = bytearray(file.getvalue())
    content[at : at + len(changed)] = changed
    refusal = ""
    try:
        read_wheel(io.BytesIO(bytes(content)), NAME, most_bytes=1 << 20)
    except WheelError as error:
        refusal = error.message
    if refusal:
        assert NAME.file in refusal
        return
    names = [name for name, _ in members]
    assert len(names) == len(set(names))
    assert {f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD"} <= {*names}
