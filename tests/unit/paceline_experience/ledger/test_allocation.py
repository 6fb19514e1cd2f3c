"""What an allocator is asked costs no more than what it looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.generation.allocators.redundancy import Redundancy
from paceline.methods.dars.allocator import Dars
from paceline.plugins import Context, OpenGroup, Pick, Start, registry
from paceline_experience.ledger.generation.allocation import InstalledAllocation, open_group
from paceline_experience.ledger.records import EpisodeSummary
from paceline_experience.ledger.state import GroupRecord

if TYPE_CHECKING:
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds

SIZE = 512


class Counted(list[EpisodeSummary | None]):
    """Counts how often all of it is read."""

    reads = 0

    def __iter__(self) -> Iterator[EpisodeSummary | None]:
        self.reads += 1
        return super().__iter__()


class OneSuccess:
    """Closes a group with its first success."""

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        del pick, context
        return (Start(),) * SIZE

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        del group, context
        return ()

    def enough(self, group: OpenGroup) -> bool:
        return any(reward > 0.5 for reward in group.rewards)


def group_of(num_finished: int, *, reward: float = 0.0) -> GroupRecord:
    done = EpisodeSummary(1, reward, False, 2, 4, 0, 1)
    left = SIZE - num_finished
    return GroupRecord(
        group_id="j1.0",
        seq=0,
        position=3,
        states="f" * num_finished + "l" * left,
        attempts=[1] * SIZE,
        workers=["w"] * SIZE,
        results=Counted([done] * num_finished + [None] * left),
        num_requeues=0,
        version=-1,
        deadlines=[0.0] * SIZE,
    )


async def reads_of(plugin: Any, worlds: Worlds, store: Store) -> tuple[int, list[bool]]:
    """How often results are read while a wave finishes one by one, and what was answered."""
    spec = worlds(store, experience={"allocator": {"kind": "redundancy"}, "group_size": 8}).spec
    allocation = InstalledAllocation(
        plugin, kind="redundancy", context=Context(0, spec.stop.steps, spec.tasks.seed)
    )
    groups = [group_of(n) for n in range(1, SIZE)]
    answers = [await allocation.enough(each) for each in groups]
    found = [each.results for each in groups]
    return sum(each.reads for each in found if isinstance(each, Counted)), answers


async def test_no_episode_is_made_for_who_does_not_look_at_it(store: Store, worlds: Worlds) -> None:
    """One that never closes early is not asked, and one that counts makes none."""
    assert await reads_of(Dars(group_size=8), worlds, store) == (0, [False] * (SIZE - 1))
    reads, answers = await reads_of(Redundancy(group_size=500, extra=12), worlds, store)
    assert reads == 0
    assert answers == [False] * 499 + [True] * 12
    reads, answers = await reads_of(OneSuccess(), worlds, store)
    assert (reads, any(answers)) == (SIZE - 1, False)  # it looks at all of them, every time


def test_only_redundancy_of_the_built_in_ones_is_asked() -> None:
    kinds = {n: registry.find("allocators", n) for n in registry.installed("allocators")}
    own = {n for n, each in kinds.items() if each.__module__.startswith("paceline.")}
    assert {n for n in own if hasattr(kinds[n], "enough")} == {"redundancy"}


def test_an_open_group_shows_what_has_finished() -> None:
    found = open_group(group_of(2, reward=1.0))
    assert (len(found.episodes), found.num_open, found.rewards) == (2, SIZE - 2, (1.0, 1.0))
    assert found.pick == Pick(3)
    assert [each.index for each in found.episodes] == [0, 1]
    assert found.episodes[-1].index == 1
    assert len(found.episodes[:1]) == 1
