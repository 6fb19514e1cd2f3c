"""Allocators of methods: how many episodes a group gets, with the numbers of their papers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import InvalidError
from paceline.methods.dars.allocator import Dars
from paceline.methods.dart.allocator import DartRollouts
from paceline.methods.parts import student_t
from paceline.methods.rac.allocator import Rac
from paceline.methods.scope.allocator import Scope
from paceline.methods.xrpo.allocator import XrpoPlanner
from paceline.plugins import (
    Context,
    FinishedEpisode,
    FinishedTurn,
    GroupOutcome,
    Limits,
    OpenGroup,
    Pick,
    Start,
)

AT = Context(0, 10)
PICK = Pick(3)


def group(rewards: Sequence[float], *, waves: int = 1, task: int = 3) -> OpenGroup:
    episodes = tuple(FinishedEpisode(i, Start(), each) for i, each in enumerate(rewards))
    return OpenGroup(Pick(task), episodes, waves=waves)


def outcome(
    rewards: Sequence[float], lengths: Sequence[int] = (), *, task: int = 3
) -> GroupOutcome:
    return GroupOutcome(task, tuple(rewards), ("",) * len(rewards), lengths=tuple(lengths))


def taught(allocator: Any, *batches: Sequence[GroupOutcome]) -> dict[str, Any]:
    """The memory after some batches; the allocator knows it."""
    memory: dict[str, Any] = {}
    allocator.remember(memory)
    for step, outcomes in enumerate(batches):
        context = Context(step, 10, memory=memory, outcomes=outcomes)
        memory = {**memory, **allocator.observe(outcomes, context)}
        allocator.remember(memory)
    return memory


def played(
    allocator: Any, reward: Callable[[], float], *, batches: int, groups: int
) -> list[list[list[float]]]:
    """Rewards by batch and group while the allocator learns; `reward` is drawn by episode."""
    memory: dict[str, Any] = {}
    allocator.remember(memory)
    found: list[list[list[float]]] = []
    for step in range(batches):
        batch: list[list[float]] = []
        for _ in range(groups):
            rewards = [reward() for _ in allocator.start(PICK, AT)]
            waves = 1
            while more := allocator.more(group(rewards, waves=waves), AT):
                rewards += [reward() for _ in more]
                waves += 1
            batch.append(rewards)
        outcomes = [outcome(rewards) for rewards in batch]
        context = Context(step, batches, memory=memory, outcomes=outcomes)
        memory = {**memory, **allocator.observe(outcomes, context)}
        allocator.remember(memory)
        found.append(batch)
    return found


class TestDart:
    def test_numbers(self) -> None:
        rates = (0.0, 0.5, 0.6, 0.61, 0.7, 0.75, 0.8, 0.9, 1.0)
        dart = DartRollouts(group_size=8)
        assert [dart.number(rate) for rate in rates] == [8, 8, 8, 7, 5, 5, 4, 3, 2]
        assert DartRollouts(group_size=4, least=3).number(1.0) == 3
        assert DartRollouts(group_size=4, most=16).number(0.7) == 5

    def test_the_newest_episodes_of_a_task_decide(self) -> None:
        dart = DartRollouts(group_size=8)
        assert (
            taught(dart, [outcome([0.0] * 8)], [outcome([1.0] * 6)])["3"][0]
            == [0.0] * 2 + [1.0] * 6
        )
        assert len(dart.start(PICK, AT)) == 5  # 6 of 8
        taught(dart, [outcome([0.0] * 8)], [outcome([1.0] * 6)], [outcome([1.0] * 2)])
        assert len(dart.start(PICK, AT)) == 2
        assert len(dart.start(Pick(4), AT)) == 8
        assert not dart.more(group([0.0] * 8), AT)

    def test_two_groups_of_a_task_in_a_batch_both_count(self) -> None:
        dart = DartRollouts(group_size=8, last=16)
        taught(dart, [outcome([1.0] * 8), outcome([0.0, 0.0])])
        assert len(dart.start(PICK, AT)) == 4  # 8 of 10

    def test_the_longest_success_limits_a_task(self) -> None:
        dart = DartRollouts(group_size=2, slack=1.5)
        taught(dart, [outcome([1.0, 0.0], [7, 90])], [outcome([1.0, 1.0], [3, 4])])
        assert {each.limits for each in dart.start(PICK, AT)} == {Limits(max_tokens=11)}
        assert dart.start(Pick(4), AT)[0].limits == Limits()
        taught(dart, [outcome([0.0, 0.5], [7, 9])])
        assert dart.start(PICK, AT)[0].limits == Limits()

    def test_without_slack_nothing_is_limited(self) -> None:
        dart = DartRollouts(group_size=2)
        taught(dart, [outcome([1.0, 1.0], [7, 8])])
        assert dart.start(PICK, AT) == (Start(), Start())

    def test_failed_groups_say_nothing(self) -> None:
        failed = GroupOutcome(3, (), (), failed="group_failed")
        assert DartRollouts(group_size=8).observe([failed], AT) == {}

    def test_refused(self) -> None:
        with pytest.raises(InvalidError, match="least"):
            DartRollouts(group_size=1)
        with pytest.raises(InvalidError, match="at most 512"):
            DartRollouts(group_size=600)


class TestDars:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"schedule": "equal_treatment"}, [24, 11, 3, 1, 0]),
            ({"schedule": "equal_treatment", "with_std": True}, [9, 5, 2, 1, 0]),
            ({"schedule": "equal_treatment", "most": 64}, [27, 11, 3, 1, 0]),
        ],
    )
    def test_numbers(self, options: dict[str, Any], expected: list[int]) -> None:
        dars = Dars(group_size=8, hopeless_share=None, **options)
        dars.remember({})
        groups = [group([1.0] * solved + [0.0] * (8 - solved)) for solved in range(5)]
        assert [len(dars.more(each, AT)) for each in groups] == expected
        assert not dars.more(group([0.0] * 8, waves=2), AT)
        assert not dars.more(group([1.0] * 8), AT)

    def test_a_group_that_is_larger_than_most_gets_no_second_wave(self) -> None:
        assert Dars(group_size=80, hopeless_share=None).extra(0.25, 80) == 0

    def test_hopeless_prompts_before_anything_is_known(self) -> None:
        dars = Dars(group_size=8)
        dars.remember({})
        assert len(dars.more(group([0.0] * 8), AT)) == 3  # 3 of 11
        assert len(dars.more(group([1.0] + [0.0] * 7), AT)) == 24

    def test_hopeless_prompts_share_what_is_left(self) -> None:
        dars = Dars(group_size=8)
        hopeless, hard = outcome([0.0] * 11), outcome([1.0] + [0.0] * 31)
        taught(dars, [hopeless, hard])  # 40 others for one: 17 of 57
        assert len(dars.more(group([0.0] * 8), AT)) == 17
        taught(dars, [outcome([1.0] * 8)] * 100)
        assert len(dars.more(group([0.0] * 8), AT)) == 56

    @pytest.mark.parametrize("hard", [0.2, 0.7, 1.0])
    def test_the_share_holds(self, hard: float) -> None:
        """A part of the prompts is never solved, the others by half of the episodes."""
        chance = random.Random(1)
        dars = Dars(group_size=8)
        memory: dict[str, Any] = {}
        dars.remember(memory)
        extra = every = 0
        for step in range(30):
            outcomes: list[GroupOutcome] = []
            for _ in range(32):
                rate = 0.0 if chance.random() < hard else 0.5
                rewards = [float(chance.random() < rate) for _ in dars.start(PICK, AT)]
                second = dars.more(group(rewards), AT)
                extra += 0 if any(rewards) else len(second)
                rewards += [float(chance.random() < rate) for _ in second]
                every += len(rewards)
                outcomes.append(outcome(rewards))
            memory = {**memory, **dars.observe(outcomes, Context(step, 30, memory=memory))}
            dars.remember(memory)
        assert 0.22 < extra / every < 0.31


class TestXrpo:
    def test_numbers(self) -> None:
        planner = XrpoPlanner(group_size=8, explore=0.0)
        assert planner.half_width(0.5, 4) == pytest.approx(0.7956, abs=1e-4)
        assert planner.half_width(0.5, 5) == pytest.approx(0.6208, abs=1e-4)
        assert planner.priority(0.5, 4, 1) == pytest.approx(0.1748, abs=1e-4)
        assert planner.priority(0.0, 4, 1) == 0.0

    def test_quantiles(self) -> None:
        found = [student_t.quantile(0.975, freedom) for freedom in (1, 2, 3, 4, 30)]
        assert found == pytest.approx([12.7062, 4.3027, 3.1824, 2.7764, 2.0423], abs=1e-4)
        assert student_t.quantile(0.5, 3) == pytest.approx(0.0, abs=1e-9)

    def test_the_bonus_keeps_known_prompts_alive(self) -> None:
        planner = XrpoPlanner(group_size=8)
        assert planner.priority(0.0, 4, 1) > 0.0
        assert planner.priority(0.0, 4, 1) > planner.priority(0.0, 8, 1)
        assert planner.priority(0.0, 4, 5) > planner.priority(0.0, 4, 1)
        planner.remember({"price": 0.04})
        assert len(planner.more(group([0.0] * 4), AT)) == 2
        planner.remember({"price": 0.05})
        assert not planner.more(group([0.0] * 4), AT)
        assert len(planner.more(group([0.0, 1.0] * 2), AT)) == 2

    def test_waves_and_episodes_are_bounded(self) -> None:
        planner = XrpoPlanner(group_size=8, most=9, rounds=5)
        planner.remember({"price": 1e-6})
        assert len(planner.more(group([0.0, 1.0] * 4), AT)) == 1
        assert not planner.more(group([0.0, 1.0] * 5), AT)
        assert not planner.more(group([0.0, 1.0] * 4, waves=6), AT)

    @pytest.mark.parametrize("rate", [0.02, 0.5])
    def test_the_price_finds_the_budget(self, rate: float) -> None:
        chance = random.Random(2)
        planner = XrpoPlanner(group_size=8)
        batches = played(planner, lambda: float(chance.random() < rate), batches=40, groups=32)
        sizes = [len(rewards) for batch in batches[20:] for rewards in batch]
        assert sum(sizes) / len(sizes) == pytest.approx(8, rel=0.15)

    def test_a_seeded_wave_comes_last_and_once(self) -> None:
        planner = XrpoPlanner(group_size=8, seeds=3)
        planner.remember({"price": 1.0})
        failed = group([0.0] * 4)
        assert planner.more(failed, AT) == (Start(variant="seeded"),) * 3
        assert not planner.more(group([0.0, 0.0, 1.0, 0.0]), AT)
        seeded = FinishedEpisode(4, Start(variant="seeded"), 0.0)
        after = OpenGroup(PICK, (*failed.episodes, seeded), waves=2)
        planner.remember({"price": 1e-6})
        assert not planner.more(after, AT)

    def test_refused(self) -> None:
        with pytest.raises(InvalidError, match="first: 9"):
            XrpoPlanner(group_size=8, first=9)


def episode(index: int, *turns: FinishedTurn, reward: float = 0.0) -> FinishedEpisode:
    return FinishedEpisode(index, Start(), reward, turns=turns)


def turns(*rewards: float, wrong: int | None = None) -> tuple[FinishedTurn, ...]:
    """Turns that end at tokens 10, 20, ..."""
    return tuple(
        FinishedTurn(10 * (index + 1), reward, first_error=index == wrong)
        for index, reward in enumerate(rewards)
    )


def of(*episodes: FinishedEpisode, waves: int = 1) -> OpenGroup:
    return OpenGroup(PICK, episodes, waves=waves)


def parents(starts: Sequence[Start]) -> list[tuple[int, int] | None]:
    return [each.parent for each in starts]


class TestScope:
    def test_a_marked_step_is_cut_off(self) -> None:
        """Ten steps, the first bad one of index 6: six are kept."""
        found = Scope(group_size=2).more(
            of(episode(0, *turns(*[0.0] * 10, wrong=6)), episode(1, *turns(0.0, 0.0, wrong=1))), AT
        )
        assert found == (Start(variant="scope", parent=(0, 60), meta={"kept": 6}),)

    def test_nothing_is_kept_before_a_first_step_that_is_wrong(self) -> None:
        failed = of(episode(0, *turns(0.0, 0.0, wrong=0)), episode(1, FinishedTurn(5)), episode(2))
        assert Scope(group_size=3).more(failed, AT) == ()
        assert Scope(group_size=3, share=1.0).more(failed, AT) == ()

    def test_the_action_that_is_not_the_experts(self) -> None:
        matched = (FinishedTurn(10, matched_expert=True), FinishedTurn(20, patched=True))
        off = (FinishedTurn(30), FinishedTurn(40, matched_expert=True))
        never = tuple(FinishedTurn(10 * each) for each in range(1, 5))
        found = Scope(group_size=2).more(of(episode(0, *never), episode(1, *matched, *off)), AT)
        assert parents(found) == [(1, 20)]

    def test_rewards_of_turns(self) -> None:
        scope = Scope(group_size=1)
        assert parents(scope.more(of(episode(0, *turns(0, 0.5, 0, 0))), AT)) == [(0, 20)]
        assert parents(scope.more(of(episode(0, *turns(0.1, 0, 0, -1, 0.5))), AT)) == [(0, 30)]
        # Earned by the last turn, which tells of no state to go back to.
        assert parents(scope.more(of(episode(0, *turns(0, 0, 0, 0.5))), AT)) == [(0, 20)]

    def test_a_share_if_nothing_tells(self) -> None:
        five = of(episode(0, *turns(*[0.0] * 5)))
        assert parents(Scope(group_size=1).more(five, AT)) == [(0, 20)]
        assert parents(Scope(group_size=1, share=1.0).more(five, AT)) == [(0, 40)]

    def test_only_groups_without_success_and_only_once(self) -> None:
        failed = episode(0, *turns(*[0.0] * 4))
        assert not Scope(group_size=2).more(of(failed, episode(1, reward=1.0)), AT)
        assert not Scope(group_size=2).more(of(failed, waves=2), AT)

    def test_several_continue_different_siblings(self) -> None:
        failed = [episode(i, *turns(*[0.0] * 6, wrong=i)) for i in range(4)]
        found = Scope(group_size=4, count=2).more(of(*failed), AT)
        assert parents(found) == [(3, 30), (2, 20)]
        found = Scope(group_size=4, count=5).more(of(*failed), AT)
        assert parents(found) == [(3, 30), (2, 20), (1, 10), (3, 30), (2, 20)]


def continued_chains(chance: random.Random, known: OpenGroup, starts: Sequence[Start]) -> OpenGroup:
    """The group after these starts: each plays six sums until one is wrong."""
    episodes = list(known.episodes)
    for start in starts:
        right = start.parent[1] // 10 if start.parent else 0
        while right < 6 and chance.random() < 0.3:
            right += 1
        shown = turns(*[0.0] * min(right + 1, 6))
        done = FinishedEpisode(len(episodes), start, float(right == 6), turns=shown)
        episodes.append(done)
    return replace(known, episodes=tuple(episodes))


class TestRac:
    def test_recoveries_of_recoveries(self) -> None:
        """A chain that ends at its first error: each round comes further."""
        rac = Rac(group_size=2, count=2, rounds=3, share=1.0)
        known = [episode(0, *turns(0, 0)), episode(1, *turns(0, 0, 0))]
        assert parents(rac.more(of(*known), AT)) == [(1, 20), (1, 20)]
        known += [episode(2, *turns(0, 0, 0)), episode(3, *turns(*[0] * 5))]
        assert parents(rac.more(of(*known, waves=2), AT)) == [(3, 40), (3, 40)]
        assert not rac.more(of(*known, episode(4, reward=1.0), waves=3), AT)
        assert not rac.more(of(*known, waves=4), AT)

    def test_a_chain_of_which_no_group_is_rewarded(self) -> None:
        """Six sums in a row, each right with 0.3: a group of eight has a success in 0.6 %."""
        chance = random.Random(0)
        rac = Rac(group_size=8, count=4, rounds=7, share=1.0)
        at_first = in_the_end = 0
        for _ in range(100):
            known, starts = of(), rac.start(PICK, AT)
            while starts:
                known = continued_chains(chance, known, starts)
                at_first += known.waves == 1 and any(known.rewards)
                starts = rac.more(known, AT)
                known = replace(known, waves=known.waves + 1)
            in_the_end += any(known.rewards)
        assert at_first < 5
        assert in_the_end > 80

    def test_until_enough_have_succeeded(self) -> None:
        rac = Rac(group_size=2, wanted=2, parents=2, count=3)
        known = of(episode(0, *turns(0, 0)), episode(1, *turns(0, 0), reward=1.0))
        assert parents(rac.more(known, AT)) == [(0, 10)] * 3
        solved = of(*(episode(index, reward=1.0) for index in range(2)))
        assert not rac.more(solved, AT)
