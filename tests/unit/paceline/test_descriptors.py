"""A distribution of strangers names its plug-ins by descriptors, or each by an entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import resolve_job
from paceline.config.named import problems
from paceline.config.options import wrong_options
from paceline.config.recipes import recipe
from paceline.errors import InvalidError
from paceline.plugins import Method, Plugin, Plugins, declared, registry

METHOD = '''
"""Halving: half of every weight (nobody 2026).

More words.
"""

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("entropy",))
class HalvedOptions(StrictModel):
    share: float = Field(default=0.5, gt=0.0)


METHOD = Method(
    stage="control",
    evidence="notes",
    parts={
        "corrections": {"halved": Plugin(".correction:halved", HalvedOptions)},
        "filters": {"large": Plugin(".filter:large")},
    },
)
'''
FILES = {
    "halving/__init__.py": METHOD,
    "halving/correction.py": "raise RuntimeError('as torch: only where it runs')\n",
    "halving/filter.py": "def large(group, *, least: int = 2):\n    return None\n",
    "halving/recipe.yaml": "trainer: {objective: {corrections: [{kind: halved, share: 0.25}]}}\n",
    "copied/__init__.py": METHOD,
    "broken.py": "import surely_missing\n",
    "no_descriptor.py": "PLUGINS = 3\n",
    "other.py": "def large(group, *, most: int = 9):\n    return None\n",
}
JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
    "recipe": "halving",
}
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with these entry points and the modules above."""

    def write(entry_points: str) -> None:
        for name, text in FILES.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        folder = tmp_path / "strange-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(tmp_path)
        registry.refresh()

    yield write
    monkeypatch.undo()
    for name in {Path(each).parts[0].removesuffix(".py") for each in FILES}:
        sys.modules.pop(name, None)
    registry.refresh()
    recipe.cache_clear()


def test_a_method_of_one_entry_point_has_parts_options_and_a_recipe(install: Install) -> None:
    install("[paceline.methods]\nhalving = halving:METHOD\n")
    assert registry.target("corrections", "halved") == "halving.correction:halved"
    assert registry.find("filters", "large").__name__ == "large"
    assert declared(registry.options_of("corrections", "halved")).needs_with({}) == ("entropy",)
    assert [*wrong_options("f", "filters", "large", {"lest": 1})] == [
        "f.lest: unknown option of 'large'; allowed: least"
    ]
    assert recipe("halving").title == "Halving: half of every weight (nobody 2026)"
    assert [*problems(resolve_job(JOB))] == []
    job = JOB | {"trainer": {"objective": {"corrections": [{"kind": "halved", "share": 0}]}}}
    assert [*problems(resolve_job(job))] == [
        "trainer.objective.corrections.0.share: Input should be greater than 0 (got 0)"
    ]


def test_what_cannot_be_read_breaks_nothing_else_and_is_named(install: Install) -> None:
    install(
        "[paceline.methods]\nhalving = halving:METHOD\nbroken = broken:METHOD\n"
        "[paceline.plugins]\nother = no_descriptor:PLUGINS\n"
    )
    registry.check("corrections", "halved")
    registry.check("corrections", "tis")
    assert registry.unreadable() == {
        "broken:METHOD": "ModuleNotFoundError: No module named 'surely_missing'",
        "no_descriptor:PLUGINS": "TypeError: it is not a Plugins but 3",
    }
    with pytest.raises(InvalidError, match=r"broken:METHOD cannot be read: .*surely_missing"):
        registry.check("corrections", "of_the_broken")
    with pytest.raises(InvalidError, match=r"'broken' cannot be read: .*surely_missing"):
        recipe("broken")


def test_two_plug_ins_of_one_name_are_refused_and_a_third_is_not(install: Install) -> None:
    install("[paceline.methods]\nhalving = halving:METHOD\ncopied = copied:METHOD\n")
    with pytest.raises(
        InvalidError,
        match=r"'halved' is the name of two that are installed, halving\.correction:halved and "
        r"copied\.correction:halved; uninstall or rename one",
    ):
        registry.check("corrections", "halved")
    registry.check("corrections", "tis")


def test_an_entry_point_of_its_own_comes_first_with_its_own_options(install: Install) -> None:
    install(
        "[paceline.methods]\nhalving = halving:METHOD\n"
        "[paceline.filters]\nlarge = other:large\nbare = other:large\n"
        "[paceline.options.filters]\nlarge = other:large\n"
    )
    assert registry.target("filters", "large") == "other:large"
    assert registry.installed("filters")["large"].target == "other:large"
    assert [*wrong_options("f", "filters", "large", {"least": 1})] == [
        "f.least: unknown option of 'large'; allowed: most"
    ]
    # Without a description of its options, they are checked where it runs.
    assert [*wrong_options("f", "filters", "bare", {"anything": 1})] == []
    assert "bare" not in registry.built_in("filters")


def test_a_recipe_that_an_entry_point_names_has_no_parts(install: Install) -> None:
    install("[paceline.recipes]\nplain = halving:METHOD\n")
    assert recipe("plain").fragment()["trainer"]["objective"]["corrections"][0]["share"] == 0.25
    with pytest.raises(InvalidError, match="corrections: 'halved' is not installed"):
        registry.check("corrections", "halved")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"correction": {"a": Plugin("m:a")}}, "'correction' is not one of .*corrections"),
        ({"environments": {"a": Plugin("m:a")}}, "'environments' is not one of"),
        ({"filters": {"m:a": Plugin("m:a")}}, "filters: 'm:a' cannot be a name"),
        ({"hooks": {"a": Plugin("m:a")}}, "hooks: 'a' needs `options`"),
    ],
)
def test_a_descriptor_that_cannot_be_is_refused(parts: dict[str, Any], message: str) -> None:
    for make in (Plugins, lambda parts: Method("control", "code", parts=parts)):  # pyright: ignore
        with pytest.raises(ValueError, match=message):
            make(parts)
