"""JSON of models is parsed within limits, and not in the process of the service that asks."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.models.parsing import ParseError, parse
from paceline.models.weights import INDEX, MAX_HEADER_BYTES, check_headers, check_weights
from paceline_gateway.submit.checks import check_files

MANY = b"[" + b"{}," * (1 << 20) + b"{}]"  # 3 MB, of which Python makes 70 MB


def stored(path: Path, header: bytes, size: int | None = None) -> Path:
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        if size is not None:
            file.truncate(size)  # sparse
    return path


def test_a_header_that_is_too_large_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((99 << 20).to_bytes(8, "little"))
        file.truncate(100 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=f"at most {MAX_HEADER_BYTES} are allowed"):
            check_headers([path])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_headers_of_all_files_together_are_bounded(tmp_path: Path) -> None:
    header = b"{}".ljust(MAX_HEADER_BYTES)
    paths = [stored(tmp_path / f"{at}.safetensors", header) for at in range(9)]
    check_headers(paths[:2])
    with pytest.raises(ConfigError, match="the headers of its weights have more than"):
        check_headers(paths)


def headers(folder: Path) -> None:
    path = stored(folder / "model.safetensors", b'{"a": ' + MANY + b"}")
    with pytest.raises(ConfigError, match="bad header"):
        check_headers([path])


def index(folder: Path) -> None:
    content = b'{"weight_map": ' + MANY + b"}"
    with pytest.raises(ConfigError, match="is damaged"):
        check_weights({INDEX: len(content)}, lambda _: content, source=str(folder))


def config(folder: Path) -> None:
    needed = {"config.json": b'{"a": ' + MANY + b"}", "tokenizer.json": b"{}"}
    check_files(needed, source=str(folder))


def tokenizer(folder: Path) -> None:
    needed = {"config.json": b"{}", "tokenizer.json": b'{"a": ' + MANY + b"}"}
    check_files(needed, source=str(folder))


@pytest.mark.parametrize("read", [headers, index, config, tokenizer])
def test_the_service_makes_no_objects_of_it(read: Callable[[Path], None], tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(MANY)
    finally:
        tracemalloc.stop()


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("what", "pieces", "at"),
    [
        ("names", [DEEP, b"{}"], 0),
        ("names", [b'{"weight_map": ["a"]}', b"{}"], 0),
        ("headers", [b"{}", b"{}", b"{}", DEEP], 1),
        ("headers", [b"{}", b"{}", b'{"a": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}"], 0),
        ("vocabulary", [b"{}", DEEP], 1),
        ("vocabulary", [b"\xff", b"{}"], 0),
    ],
)
def test_what_cannot_be_parsed_is_named(what: str, pieces: list[bytes], at: int) -> None:
    with pytest.raises(ParseError) as wrong:
        parse(what, pieces)  # pyright: ignore[reportArgumentType]
    assert wrong.value.at == at


def test_what_takes_too_much_memory_is_refused() -> None:
    huge = b"[" + b"{}," * (24 << 20) + b"{}]"  # needs 1.6 GB
    with pytest.raises(ParseError, match="too much memory"):
        parse("vocabulary", [b"{}", huge])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None)
@given(JSON, JSON, st.sampled_from(["names", "headers"]), st.sampled_from(["", "weight_map", "a"]))
def test_any_json_is_read_or_refused(value: object, config: object, what: str, key: str) -> None:
    text = json.dumps({key: value} if key else value).encode()
    other = json.dumps(config).encode()
    pieces = [text, other] if what == "names" else [other, b"{}", text]
    try:
        value = parse(what, pieces)  # pyright: ignore[reportArgumentType]
    except ParseError as error:
        value = [] if error.at == 0 else None
    assert isinstance(value, list)
