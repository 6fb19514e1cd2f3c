"""What a job may write into its `requirements.txt`."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from paceline.errors import InvalidError
from paceline.isolation.code.archive import check, pack
from paceline.isolation.code.requirements import MAX_REQUIREMENTS, parse


def test_names_versions_markers_and_hashes_are_taken() -> None:
    digest = "a" * 64
    text = f"""
    # for scoring
    sympy>=1.12,<2   # symbols
    numpy ~= 1.26 ; python_version >= "3.11"
    rich[jupyter]
    regex==2024.1.1 \\
        --hash=sha256:{digest} \\
        --hash=sha256:{"b" * 64}
    """
    assert parse(text.encode()) == (
        "sympy<2,>=1.12",
        'numpy~=1.26; python_version >= "3.11"',
        "rich[jupyter]",
        f"regex==2024.1.1 --hash=sha256:{digest} --hash=sha256:{'b' * 64}",
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--index-url https://evil.example/simple", "options are not allowed"),
        ("-e .", "options are not allowed"),
        ("-r other.txt", "options are not allowed"),
        ("sympy --no-binary=sympy", "options are not allowed"),
        ("sympy --hash=sha256:zz", "options are not allowed"),
        ("sympy @ https://evil.example/sympy.whl", "addresses and paths are not allowed"),
        ("sympy @ file:sympy.whl", "addresses"),
        ("git+https://evil.example/x", "addresses and paths are not allowed"),
        ("./local", "addresses and paths are not allowed"),
        ("/etc/passwd", "addresses and paths are not allowed"),
        ("local.whl", "addresses and paths are not allowed"),
        ("${SECRET}", "variables are not allowed"),
        ("sympy >", "Expected"),
        ("two words", "Expected"),
        ("sympy; os_name ~= 'x'", "Undefined"),
        ("sympy; 'x' in 'y'", "'x'"),
        ("sympy==" + "1" * 5000, "4300 digits"),
    ],
)
def test_what_says_where_packages_come_from_is_refused_with_its_line(line: str, why: str) -> None:
    with pytest.raises(InvalidError, match=rf"requirements.txt: line 3: .*{why}"):
        parse(f"# first\nsympy\n{line}\n".encode())


def test_too_many_and_too_large_are_refused() -> None:
    with pytest.raises(InvalidError, match=f"at most {MAX_REQUIREMENTS} are allowed"):
        parse("\n".join(f"a{n}" for n in range(MAX_REQUIREMENTS + 1)).encode())
    with pytest.raises(InvalidError, match="bytes; at most"):
        parse(b"#" * (1 << 20))


@given(st.text(alphabet=st.sampled_from("a1-_.=<>~!@:/\\ \n#;[]${}'\"\r\t\x0c\u2028"), max_size=60))
def test_nothing_gets_through_that_pip_would_read_otherwise(text: str) -> None:
    try:
        found = parse(text.encode())
    except InvalidError:
        return
    for line in found:
        assert len(line.splitlines()) == 1
        assert not line.startswith("-")
        assert "$" not in line
        assert Requirement(line).url is None


def test_wrong_requirements_are_refused_when_packed_and_when_uploaded(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-e .\n")
    with pytest.raises(InvalidError, match="line 1"):
        pack(tmp_path, io.BytesIO())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("requirements.txt", "-e .\n")
    with pytest.raises(InvalidError, match="line 1"):
        check(made)
