import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_controller.scaling.planner import (
    Offer,
    Speed,
    cheapest,
    fit_speed,
    needed_rate,
    overlap_steps,
    provisioned_rate,
    scorers,
    speed_of,
)


@pytest.mark.parametrize(
    ("steps", "spread_s", "rate"),
    [(5, 100, 12.8), (5, 0, 8.533), (2, 100, 51.2), (3, 100, 19.2), (10, 100, 10.24)],
)
def test_the_provisioning_rule_gives_the_published_figures(
    steps: int, spread_s: float, rate: float
) -> None:
    found = provisioned_rate(per_step=512, step_s=60, steps=steps, spread_s=spread_s)
    assert found == pytest.approx(rate, abs=1e-3)


def test_weights_that_spread_longer_than_the_steps_last_leave_no_time() -> None:
    assert provisioned_rate(per_step=512, step_s=60, steps=1, spread_s=100) == math.inf


@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "steps"), [(0, 1, 0), (4, 1, 4), (4, 2, 3), (1, 2, 0)]
)
def test_overlap(max_staleness: int, publish_every: int, steps: int) -> None:
    assert overlap_steps(max_staleness=max_staleness, publish_every=publish_every) == steps


def test_a_synchronous_job_samples_while_the_trainer_waits() -> None:
    rate = needed_rate(per_step=600, step_s=60, overlap=0, spread_s=0, wait_share=0.5)
    assert rate == pytest.approx(10)
    quicker = needed_rate(per_step=600, step_s=60, overlap=0, spread_s=0, wait_share=0.25)
    assert quicker == pytest.approx(30)


def test_lagging_buys_time_but_never_less_than_what_is_trained() -> None:
    rates = [
        needed_rate(per_step=600, step_s=60, overlap=lag, spread_s=30, wait_share=0.25)
        for lag in range(5)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] >= 10


@given(
    st.floats(1, 1e6),
    st.floats(0.1, 1e3),
    st.integers(0, 8),
    st.floats(0, 1e4),
    st.floats(0.05, 0.9),
)
def test_the_rate_is_finite_and_grows_with_demand(
    per_step: float, step_s: float, overlap: int, spread_s: float, wait_share: float
) -> None:
    def rate(per_step: float) -> float:
        return needed_rate(
            per_step=per_step,
            step_s=step_s,
            overlap=overlap,
            spread_s=spread_s,
            wait_share=wait_share,
        )

    assert 0 < rate(per_step) < math.inf
    assert rate(2 * per_step) == pytest.approx(2 * rate(per_step))
    assert overlap == 0 or rate(per_step) >= per_step / step_s * 0.999


@given(st.floats(0, 0.1), st.floats(1e-5, 0.01), st.integers(1, 400), st.integers(2, 64))
def test_so_many_workers_make_the_rate(
    fixed_s: float, request_s: float, requests: int, number: int
) -> None:
    """What `number` workers make needs that many, unless fewer make four fifths of the limit."""
    speed = Speed(fixed_s, request_s)
    rate = number * speed.rate(requests / number)
    found = speed.workers(rate, requests=requests, max_requests=1e9)
    if fixed_s == 0 or rate <= 0.8 * requests / fixed_s:
        assert found == pytest.approx(number, rel=1e-6)
    else:
        assert found <= number


def test_throughput_is_limited_by_concurrent_requests() -> None:
    speed = Speed(0.0, 0.01)
    assert speed.workers(200, requests=1000, max_requests=10) == pytest.approx(2)
    slow = Speed(0.1, 0.01)
    assert slow.rate(10) == pytest.approx(50)
    assert slow.workers(200, requests=1000, max_requests=10) == pytest.approx(4)


def test_speed_is_found_again() -> None:
    speed = Speed(0.02, 0.001)
    points = [(c, c / speed.rate(c), 1.0) for c in (4.0, 16.0, 100.0)]
    found = fit_speed(points)
    assert found is not None
    assert found.fixed_s == pytest.approx(speed.fixed_s)
    assert found.request_s == pytest.approx(speed.request_s)


def test_a_single_batch_size_does_not_determine_the_fixed_cost() -> None:
    found = fit_speed([(100.0, 0.2, 1.0), (110.0, 0.21, 1.0)])
    assert found is not None
    assert found.fixed_s == 0
    assert found.rate(100) == pytest.approx(100 / 0.2, rel=0.05)
    assert fit_speed([]) is None


@given(
    st.lists(st.tuples(st.floats(0.1, 500), st.floats(1e-4, 10), st.floats(0.01, 1)), min_size=1)
)
def test_any_measurements_give_a_law(points: list[tuple[float, float, float]]) -> None:
    found = fit_speed(points)
    assert found is not None
    assert found.fixed_s >= 0
    assert found.request_s > 0


def test_scorers_clear_the_queue_in_time() -> None:
    assert scorers(pending=120, service_s=0.5, queue_s=6) == 10
    assert scorers(pending=0, service_s=0.5, queue_s=6) == 0


PUBLISHED = {"D": (0.8, 0.10), "A": (2.0, 0.30), "C": (4.0, 0.70), "B": (1.0, 0.18)} | {
    "E": (3.0, 0.60),
    "F": (5.0, 1.10),
}


def test_the_published_choice() -> None:
    offers = [Offer(name, *figures, 0, 1) for name, figures in PUBLISHED.items()]
    chosen = cheapest(12.8, offers)
    assert {name for name, count in chosen.items() if count} == set("ABCDF")
    assert sum(PUBLISHED[name][1] for name, count in chosen.items() if count) == pytest.approx(2.38)


OFFERS = st.lists(
    st.tuples(st.floats(0.1, 8), st.floats(0.1, 8), st.integers(0, 4), st.integers(0, 30)),
    min_size=1,
    max_size=5,
)


@given(st.floats(0, 200), OFFERS)
def test_a_choice_meets_the_need_within_bounds(
    need: float, figures: list[tuple[float, float, int, int]]
) -> None:
    offers = sorted(
        (Offer(str(i), s, c, low, low + more) for i, (s, c, low, more) in enumerate(figures)),
        key=lambda each: each.cost / each.speed,
    )
    chosen = cheapest(need, offers)
    assert all(offer.min_count <= chosen[offer.name] <= offer.max_count for offer in offers)
    made = speed_of(chosen, offers)
    everything = speed_of({offer.name: offer.max_count for offer in offers}, offers)
    assert made >= min(need, everything) - 1e-6
    for offer in offers:  # nobody is superfluous
        if chosen[offer.name] > offer.min_count:
            assert made - offer.speed < need + 1e-6
