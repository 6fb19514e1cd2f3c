"""Tests that docs/security.md names exist, and every section of promises has some."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
TABLE = PAGE[PAGE.index("\n## Tests of these promises\n") :]
# Sections that describe what there is and promise no protection.
WITHOUT_PROMISES = {"Assets", "Several tenants on one GPU", "Tests of these promises"}


def named_tests() -> list[str]:
    return sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


def exists(name: str) -> bool:
    """Whether a file of tests exists and, after `::`, a test function in it."""
    file, _, function = name.partition("::")
    path = ROOT / file
    if not path.is_file() or not path.name.startswith("test_"):
        return False
    if not function:
        return True
    definition = rf"^(?: {{4}})?(?:async )?def {re.escape(function)}\("
    return function.startswith("test_") and bool(
        re.search(definition, path.read_text(), re.MULTILINE)
    )


def rows_by_section() -> dict[str, list[tuple[str, str]]]:
    """Rows (promise, tests) of the table, by the section in whose part they stand."""
    rows: dict[str, list[tuple[str, str]]] = {}
    section = ""
    for promise, tests in re.findall(r"^\| (.+?) \| (.*?) ?\|$", TABLE, re.MULTILINE):
        heading = re.fullmatch(r"\*\*(.+)\*\*", promise)
        if heading:
            section = heading[1]
            rows[section] = []
        elif section:
            rows[section].append((promise, tests))
    return rows


@pytest.mark.parametrize("name", named_tests())
def test_named_tests_exist(name: str) -> None:
    assert exists(name), f"docs/security.md: {name}: no such test"


def test_names_that_do_not_exist_are_noticed() -> None:
    here = "tests/packaging/test_security_page.py"
    assert exists(here)
    assert exists(f"{here}::test_names_that_do_not_exist_are_noticed")
    assert not exists(f"{here}::test_names_that_do_not_exist")
    assert not exists(f"{here}::named_tests")
    assert not exists("tests/packaging/test_no_such_page.py")
    assert not exists("tests/packaging")


def test_every_section_of_promises_has_rows_in_the_order_of_the_page() -> None:
    sections = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert set(sections) >= WITHOUT_PROMISES
    promising = [section for section in sections if section not in WITHOUT_PROMISES]
    rows = rows_by_section()
    assert list(rows) == promising
    assert [section for section, listed in rows.items() if not listed] == []


def test_every_row_names_a_test_and_nothing_else() -> None:
    for promise, tests in (row for rows in rows_by_section().values() for row in rows):
        assert re.fullmatch(r"`tests/[^`]+`(, `tests/[^`]+`)*", tests), promise
