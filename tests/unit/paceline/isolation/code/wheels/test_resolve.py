"""Which wheels are chosen, and what is said if none fit together; as pip chooses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from paceline.isolation.code.wheels.errors import FetchError
from paceline.isolation.code.wheels.index import WheelOffer
from paceline.isolation.code.wheels.resolve import CONSTRAINTS, REQUIREMENTS, Ask, Hashes, resolve
from paceline.isolation.code.wheels.wheel import MetadataError, WheelMetadata, WheelName

HASH = f"sha256:{'0' * 64}"


class Wheels:
    """Wheels as `NAME VERSION` and what each needs."""

    def __init__(self, needs: Mapping[str, Sequence[str]]) -> None:
        self.yanked = set[str]()
        self.python: dict[str, str] = {}
        self.broken = set[str]()
        self.hashes: dict[str, str] = {}
        self._needs = needs

    def offers(self, project: str) -> list[WheelOffer]:
        """Of a project, the best first."""
        named = [each.split() for each in self._needs]
        versions = sorted((Version(v) for name, v in named if name == project), reverse=True)
        names = [WheelName.parse(f"{project}-{each}-py3-none-any.whl") for each in versions]
        return [
            WheelOffer(
                name,
                Path(name.file),
                {"sha256": self.hashes.get(str(name.version), "0" * 64)},
                str(name.version) in self.yanked,
            )
            for name in names
        ]

    def metadata(self, offer: WheelOffer) -> WheelMetadata:
        """What a wheel needs."""
        key = f"{offer.name.project} {offer.name.version}"
        if key in self.broken:
            raise MetadataError(f"{offer.name.file}: METADATA: broken")
        return WheelMetadata(
            tuple(map(Requirement, self._needs[key])), SpecifierSet(self.python.get(key, ""))
        )


def chosen(
    wheels: Wheels,
    *requirements: str,
    constraints: Sequence[str] = (),
    hashes: Hashes | None = None,
) -> dict[str, str]:
    """The version of each project."""
    offers = resolve(
        [Ask(Requirement(each), REQUIREMENTS) for each in requirements],
        constraints=[Ask(Requirement(each), CONSTRAINTS) for each in constraints],
        hashes=hashes or {},
        shelf=wheels,
    )
    return {each.name.project: str(each.name.version) for each in offers}


def refused(wheels: Wheels, *requirements: str, constraints: Sequence[str] = ()) -> str:
    with pytest.raises(FetchError) as error:
        chosen(wheels, *requirements, constraints=constraints)
    return error.value.message


def test_the_newest_versions_that_fit_together_are_taken() -> None:
    wheels = Wheels(
        {
            "app 2.0": ["lib>=2"],
            "app 1.0": ["lib<2"],
            "lib 2.0": ["base==1.0"],
            "lib 1.0": ["base"],
            "base 1.0": [],
            "base 2.0": [],
            "unrelated 1.0": ["nowhere"],
        }
    )
    assert chosen(wheels, "app") == {"app": "2.0", "lib": "2.0", "base": "1.0"}
    assert chosen(wheels, "app", "base>=2") == {"app": "1.0", "lib": "1.0", "base": "2.0"}
    assert chosen(wheels, "app", constraints=["lib<2"])["app"] == "1.0"
    assert chosen(wheels, "base", constraints=["lib<2", "nowhere==1"]) == {"base": "2.0"}


def test_markers_and_extras_decide_what_is_needed() -> None:
    wheels = Wheels(
        {
            "app 1.0": [
                'lib; extra == "More_Things"',
                'other; extra == "none"',
                'base; python_version >= "3"',
                'nowhere; python_version < "3"',
                'nowhere; sys_platform == "win32"',
            ],
            "lib 1.0": ["app[other]"],
            "base 1.0": [],
            "wrapper 1.0": ["app[more-things]>=1"],
        }
    )
    assert set(chosen(wheels, "app")) == {"app", "base"}
    assert set(chosen(wheels, "app[more.things]")) == {"app", "base", "lib"}
    assert set(chosen(wheels, "app", "wrapper")) == {"app", "base", "lib", "wrapper"}
    assert chosen(wheels, 'nowhere; python_version < "3"', "base") == {"base": "1.0"}


def test_an_extra_has_the_version_of_its_package() -> None:
    wheels = Wheels(
        {"app 2.0": ['lib; extra == "more"'], "app 1.0": [], "lib 1.0": ["app<2"], "lib 0.1": []}
    )
    assert chosen(wheels, "app[more]") == {"app": "2.0", "lib": "0.1"}
    assert chosen(wheels, "app[more]", "app<2") == {"app": "1.0"}


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ("app", "1.0"),
        ("app>=1.1a1", "2.0rc1"),
        ("app==2.0rc1", "2.0rc1"),
        ("app!=1.0", "2.0rc1"),
        ("app===1.0", "1.0"),
        ("app==1.*", "1.0"),
    ],
)
def test_pre_releases_are_taken_if_asked_for_or_if_there_is_nothing_else(
    requirement: str, version: str
) -> None:
    wheels = Wheels({"app 1.0": [], "app 2.0rc1": []})
    assert chosen(wheels, requirement) == {"app": version}


def test_a_yanked_version_is_taken_only_if_it_is_pinned() -> None:
    wheels = Wheels({"app 1.0": [], "app 2.0": [], "lone 3.0": []})
    wheels.yanked = {"2.0", "3.0"}
    assert chosen(wheels, "app") == {"app": "1.0"}
    assert chosen(wheels, "app==2.0") == {"app": "2.0"}
    assert "No matching distribution found for app>1" in refused(wheels, "app>1")
    assert chosen(wheels, "lone==3.0") == {"lone": "3.0"}
    assert "No matching distribution found for lone" in refused(wheels, "lone")


def test_wheels_for_other_pythons_and_broken_ones_are_passed_over_and_named() -> None:
    wheels = Wheels({"app 3.0": [], "app 2.0": [], "app 1.0": []})
    wheels.python["app 3.0"] = "<3"
    wheels.broken = {"app 2.0"}
    assert chosen(wheels, "app") == {"app": "1.0"}
    said = refused(wheels, "app>=2")
    assert "No matching distribution found for app>=2" in said
    assert "app-3.0-py3-none-any.whl requires Python <3" in said
    assert "app-2.0-py3-none-any.whl: METADATA: broken" in said


def test_what_is_missing_is_named_with_who_needs_it_and_what_there_is() -> None:
    wheels = Wheels({"app 1.0": ["symppy>=2"], "sympy 1.12": []})
    assert refused(wheels, "symppy==1.12") == (
        "No matching distribution found for symppy==1.12: no wheel of symppy fits here"
    )
    assert refused(wheels, "sympy==1.13") == (
        "No matching distribution found for sympy==1.13: there is 1.12"
    )
    assert "symppy>=2 (from app 1.0)" in refused(wheels, "app")
    said = refused(wheels, "sympy==1.12", constraints=["sympy==1.11"])
    assert "this installation requires sympy==1.11" in said


def test_a_conflict_names_both_who_require() -> None:
    wheels = Wheels({"app 1.0": ["lib<2"], "tool 1.0": ["lib>=2"], "lib 1.0": [], "lib 2.0": []})
    said = refused(wheels, "app", "tool")
    assert "app 1.0 depends on lib<2" in said
    assert "tool 1.0 depends on lib>=2" in said
    said = refused(wheels, "app", "lib==2.0")
    assert "app 1.0 depends on lib<2" in said
    assert "requirements.txt requires lib==2.0" in said


def test_with_a_hash_every_package_needs_one_and_a_version() -> None:
    wheels = Wheels({"app 1.0": ["lib"], "app 2.0": ["lib"], "lib 1.0": [], "lib 1.1": []})
    wheels.hashes = {"1.1": "1" * 64}
    app, lib = canonicalize_name("app"), canonicalize_name("lib")
    both: Hashes = {app: frozenset({HASH}), lib: frozenset({HASH})}
    assert chosen(wheels, "app==1.0", "lib==1.0", hashes=both) == {"app": "1.0", "lib": "1.0"}
    for requirements, hashes in (
        (["app==1.0", "lib==1.0"], {app: frozenset({HASH})}),
        (["app==1.0"], {app: frozenset({HASH})}),
        (["app", "lib==1.0"], both),
    ):
        with pytest.raises(FetchError, match=re.escape("with == and --hash")):
            chosen(wheels, *requirements, hashes=hashes)
    with pytest.raises(FetchError, match=re.escape("lib==1.1")):
        chosen(wheels, "app==1.0", "lib==1.1", hashes=both)


NAMES = ("a", "b", "c", "d")
VERSIONS = ("1.0", "2.0", "3.0")
LINES = st.builds(
    "{}{}".format,
    st.sampled_from(NAMES),
    st.sampled_from(["", "<2", ">1", "==2.0", "!=3.0", "[x]"]),
)
WORLDS = st.dictionaries(
    st.builds("{} {}".format, st.sampled_from(NAMES), st.sampled_from(VERSIONS)),
    st.lists(st.one_of(LINES, LINES.map('{}; extra == "x"'.format)), max_size=3),
    max_size=12,
)


@given(WORLDS, st.lists(LINES, min_size=1, max_size=3))
def test_a_solution_meets_every_requirement_and_a_refusal_is_explained(
    needs: dict[str, list[str]], requirements: list[str]
) -> None:
    refusal = ""
    found = dict[str, str]()
    try:
        found = chosen(Wheels(needs), *requirements)
    except FetchError as error:
        refusal = error.message
    if refusal:
        assert "No matching distribution" in refusal or "cannot install" in refusal
        return
    left = [Requirement(each) for each in requirements]
    seen = set[str]()
    while left:
        wanted = left.pop()
        assert wanted.specifier.contains(found[wanted.name], prereleases=True)
        if str(wanted) not in seen:
            seen.add(str(wanted))
            extra = next(iter(wanted.extras), "")
            lines = map(Requirement, needs[f"{wanted.name} {found[wanted.name]}"])
            left += [e for e in lines if e.marker is None or e.marker.evaluate({"extra": extra})]
    assert set(found) == {Requirement(each).name for each in seen}
