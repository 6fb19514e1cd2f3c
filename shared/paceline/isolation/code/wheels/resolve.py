"""Chooses wheels that fit together, as pip does, with the resolver that pip has (`resolvelib`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version
from resolvelib import AbstractProvider, BaseReporter, ResolutionImpossible
from resolvelib.resolvers import RequirementInformation, Resolution, ResolutionTooDeep

from paceline.isolation.code.wheels.errors import FetchError
from paceline.isolation.code.wheels.index import WheelOffer
from paceline.isolation.code.wheels.wheel import MetadataError, WheelMetadata

REQUIREMENTS = "requirements.txt"
CONSTRAINTS = "this installation"
_MOST_ROUNDS = 100_000
_SHOWN_VERSIONS, _SHOWN_CAUSES, _SHOWN_SKIPPED = 20, 8, 8


class KnownWheels(Protocol):
    """Where wheels and what they say of themselves come from."""

    def offers(self, project: str) -> Sequence[WheelOffer]:
        """All wheels of a project that this interpreter can import, the best first."""
        ...

    def metadata(self, offer: WheelOffer) -> WheelMetadata:
        """What a wheel needs.

        Raises:
            MetadataError: that cannot be read.
            FetchError: the wheel cannot be had.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A requirement, and who has it."""

    requirement: Requirement
    by: str

    @property
    def project(self) -> NormalizedName:
        """The name of the project that is required."""
        return canonicalize_name(self.requirement.name)

    def __str__(self) -> str:
        verb = "requires" if self.by in (REQUIREMENTS, CONSTRAINTS) else "depends on"
        return f"{self.by} {verb} {_without_marker(self.requirement)}"


@dataclass(frozen=True, slots=True)
class WheelCandidate:
    """A wheel with some of its extras."""

    offer: WheelOffer
    extras: frozenset[NormalizedName]

    @property
    def version(self) -> Version:
        """The version of the wheel."""
        return self.offer.name.version


Information = RequirementInformation[Ask, WheelCandidate]
Hashes = Mapping[NormalizedName, frozenset[str]]  # `ALGORITHM:DIGEST`; those of none are empty


def resolve(
    asks: Sequence[Ask], *, constraints: Sequence[Ask], hashes: Hashes, shelf: KnownWheels
) -> list[WheelOffer]:
    """Wheels for all requirements and what these need, one of each project.

    `constraints`: versions of projects, if they are needed. `hashes`: if there are any, each
    project needs one, and a version with `==`.

    Raises:
        FetchError: there are none; says who requires what.
        WheelError: one that might be taken is not what it says.
    """
    provider = _Provider(asks, constraints, hashes, shelf)
    asked = [ask for ask in asks if _holds(ask.requirement, frozenset())]
    try:
        resolution = Resolution(provider, BaseReporter())
        state = resolution.resolve(asked, max_rounds=_MOST_ROUNDS)
    except ResolutionImpossible as error:
        raise FetchError(provider.explain(error.causes)) from None
    except ResolutionTooDeep:
        raise FetchError(
            f"no versions that fit together after {_MOST_ROUNDS} tries; pin some with =="
        ) from None
    return list(_needed(provider, asked, state.mapping).values())


def _needed(
    provider: _Provider, asked: Sequence[Ask], mapping: Mapping[str, WheelCandidate]
) -> dict[str, WheelOffer]:
    """Wheels by file that the requirements lead to.

    Among the candidates there are also some that only abandoned ones needed. `Resolver` follows
    them to the requirements by recursion, which has no end where such ones need each other.
    """
    wheels: dict[str, WheelOffer] = {}
    left, seen = [provider.identify(ask) for ask in asked], set[str]()
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            candidate = mapping[name]
            wheels[candidate.offer.name.file] = candidate.offer
            left += [provider.identify(ask) for ask in provider.get_dependencies(candidate)]
    return wheels


class _Provider(AbstractProvider[Ask, WheelCandidate, str]):
    def __init__(
        self, asks: Sequence[Ask], constraints: Sequence[Ask], hashes: Hashes, shelf: KnownWheels
    ) -> None:
        self._order = {ask.project: number for number, ask in reversed([*enumerate(asks)])}
        self._constraints = [ask for ask in constraints if _holds(ask.requirement, frozenset())]
        self._hashes = hashes
        self._shelf = shelf
        self._skipped: dict[str, None] = {}

    def identify(self, requirement_or_candidate: Ask | WheelCandidate) -> str:
        """`NAME`, or `NAME[EXTRA,…]`, which needs what `NAME` does and more."""
        either = requirement_or_candidate
        if isinstance(either, Ask):
            return _identity(either.project, map(canonicalize_name, either.requirement.extras))
        return _identity(either.offer.name.project, either.extras)

    def get_preference(
        self,
        identifier: str,
        resolutions: Mapping[str, WheelCandidate],
        candidates: Mapping[str, Iterator[WheelCandidate]],
        information: Mapping[str, Iterator[Information]],
        backtrack_causes: Sequence[Information],
    ) -> tuple[Any, ...]:
        """What is pinned first, then what has failed, then in the order of the file."""
        asks = [each.requirement for each in information[identifier]]
        project = asks[0].project
        causes = {each.requirement.project for each in backtrack_causes}
        order = self._order.get(project, sys.maxsize)
        is_pinned = any(_is_pinned(ask.requirement.specifier) for ask in asks)
        return not is_pinned, project not in causes, order, identifier

    def find_matches(
        self,
        identifier: str,
        requirements: Mapping[str, Iterator[Ask]],
        incompatibilities: Mapping[str, Iterator[WheelCandidate]],
    ) -> Callable[[], Iterator[WheelCandidate]]:
        """Candidates for all requirements of a project, the best version first."""
        asks = [*requirements[identifier]]
        project = asks[0].project
        if identifier != project:
            asks += requirements.get(project, ())
        bad = {each.version for each in incompatibilities[identifier]}
        extras = frozenset(canonicalize_name(each) for each in asks[0].requirement.extras)
        offers = [each for each in self._fitting(project, asks) if each.name.version not in bad]
        return partial(self._readable, offers, extras)

    def is_satisfied_by(self, requirement: Ask, candidate: WheelCandidate) -> bool:
        """Whether its version is one of those required."""
        return requirement.requirement.specifier.contains(candidate.version, prereleases=True)

    def get_dependencies(self, candidate: WheelCandidate) -> Iterable[Ask]:
        """What a wheel needs here with these extras."""
        name = candidate.offer.name
        by = f"{_identity(name.project, candidate.extras)} {name.version}"
        if candidate.extras:
            yield Ask(Requirement(f"{name.project}=={name.version}"), by)
        for each in self._shelf.metadata(candidate.offer).requires:
            if _holds(each, candidate.extras):
                yield Ask(each, by)

    def explain(self, causes: Iterable[Information]) -> str:
        """Why there is no solution, from the requirements that cannot be met together."""
        asks = list(dict.fromkeys(each.requirement for each in causes))
        missing = [ask for ask in asks if not self._fitting(ask.project, [ask])]
        if missing := missing or asks[: len(asks) == 1]:
            return "; ".join([*map(self._explain_missing, missing), *self._shown_skipped()])
        projects = {ask.project for ask in asks}
        lines = [*map(str, asks), *map(str, self._constraints_of(*projects))]
        names = " and ".join(dict.fromkeys(_asked_by(ask) for ask in asks))
        return "; ".join(
            [
                f"cannot install {names}, as their versions have conflicting requirements",
                *lines[:_SHOWN_CAUSES],
                *self._shown_skipped(),
            ]
        )

    def _shown_skipped(self) -> list[str]:
        return [*self._skipped][:_SHOWN_SKIPPED]

    def _explain_missing(self, ask: Ask) -> str:
        required = _without_marker(ask.requirement)
        text = f"No matching distribution found for {required}"
        if ask.by != REQUIREMENTS:
            text += f" (from {ask.by})"
        versions = dict.fromkeys(str(each.name.version) for each in self._offers(ask.project))
        if not versions:
            return f"{text}: no wheel of {ask.project} fits here"
        shown = ", ".join([*versions][:_SHOWN_VERSIONS])
        wants = [str(each) for each in self._constraints_of(ask.project)]
        return "; ".join([f"{text}: there is {shown}", *wants])

    def _fitting(self, project: NormalizedName, asks: Sequence[Ask]) -> list[WheelOffer]:
        """The best wheel of each version that requirements, constraints and hashes allow."""
        wanted = SpecifierSet()
        for ask in (*asks, *self._constraints_of(project)):
            wanted &= ask.requirement.specifier
        if self._hashes:
            self._check_hashed(project, asks)
        best: dict[Version, WheelOffer] = {}
        for each in self._offers(project):
            best.setdefault(each.name.version, each)
        fitting = [best[version] for version in wanted.filter(sorted(best, reverse=True))]
        if _is_pinned(wanted) and all(each.is_yanked for each in fitting):
            return fitting
        return [each for each in fitting if not each.is_yanked]

    def _offers(self, project: NormalizedName) -> list[WheelOffer]:
        """Those of a project whose hash may be a required one."""
        allowed = self._hashes.get(project, frozenset())
        return [each for each in self._shelf.offers(project) if _may_have(each, allowed)]

    def _check_hashed(self, project: NormalizedName, asks: Sequence[Ask]) -> None:
        pinned = any(_is_pinned(ask.requirement.specifier) for ask in asks)
        if not self._hashes.get(project) or not pinned:
            raise FetchError(
                f"{asks[0]}: as there is a --hash, {REQUIREMENTS} has to name every package that "
                "is installed, with == and --hash"
            )

    def _constraints_of(self, *projects: NormalizedName) -> list[Ask]:
        return [each for each in self._constraints if each.project in projects]

    def _readable(
        self, offers: Sequence[WheelOffer], extras: frozenset[NormalizedName]
    ) -> Iterator[WheelCandidate]:
        """Those whose metadata can be read, and that are for this version of Python."""
        python = default_environment()["python_full_version"]
        for offer in offers:
            try:
                metadata = self._shelf.metadata(offer)
            except MetadataError as error:
                self._skipped[error.message] = None
                continue
            if metadata.requires_python.contains(python, prereleases=True):
                yield WheelCandidate(offer, extras)
            else:
                needed = f"{offer.name.file} requires Python {metadata.requires_python}"
                self._skipped[f"{needed}; here it is {python}"] = None


def _identity(project: NormalizedName, extras: Iterable[NormalizedName]) -> str:
    names = ",".join(sorted(extras))
    return f"{project}[{names}]" if names else project


def _holds(requirement: Requirement, extras: frozenset[NormalizedName]) -> bool:
    """Whether it is needed here with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in extras or ("",))


def _is_pinned(specifiers: SpecifierSet) -> bool:
    return any(
        each.operator == "===" or (each.operator == "==" and not each.version.endswith(".*"))
        for each in specifiers
    )


def _may_have(offer: WheelOffer, allowed: frozenset[str]) -> bool:
    """Whether its hash is an allowed one, or not known yet."""
    if not allowed:
        return True
    algorithms = {each.partition(":")[0] for each in allowed}
    known = {f"{name}:{digest}" for name, digest in offer.hashes.items() if name in algorithms}
    return not known or bool(known & allowed)


def _asked_by(ask: Ask) -> str:
    return _without_marker(ask.requirement) if ask.by == REQUIREMENTS else ask.by


def _without_marker(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()
