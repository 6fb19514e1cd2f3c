"""Which GPUs a job gets on described machines."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.errors import ConfigError
from paceline.front.local.devices.demand import DeviceDemand, DeviceNeed, demand_of, engine_gpus
from paceline.front.local.devices.device import Device, described
from paceline.front.local.devices.discovery import devices_here
from paceline.front.local.devices.placement import (
    TRAINER,
    Lack,
    Placement,
    memory_share,
    more,
    place,
    worker,
)
from paceline.front.local.devices.report import plan_of
from paceline.models.memory import ModelSize

HALF = ModelSize(494_000_000, 24, 896, token_bytes=4 * 24 * 2 * 64)
SEVEN = ModelSize(7_600_000_000, 28, 3584, token_bytes=4 * 28 * 4 * 128)
GIB = 1 << 30


def job(**sections: Any) -> Any:
    raw = {
        "name": "j",
        "model": {"path": "m", "dtype": "bfloat16"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }
    trainer = {"dtype": "bfloat16", **sections.pop("trainer", {})}
    return parse_job({**raw, **sections, "trainer": trainer})


def sglang(tp: int = 1, **rollout: Any) -> dict[str, Any]:
    return {"engine": {"kind": "sglang", "tp": tp}, **rollout}


GOLDEN: list[tuple[str, ModelSize, dict[str, Any], dict[str, tuple[int, ...]] | str]] = [
    ("none", HALF, {}, {"trainer": (), "rollout-0": ()}),
    ("1x80GiB", HALF, {}, {"trainer": (0,), "rollout-0": (0,)}),
    ("2x80GiB", HALF, {}, {"trainer": (0,), "rollout-0": (1,)}),
    ("24GiB+80GiB", HALF, {}, {"trainer": (1,), "rollout-0": (0,)}),
    ("8x80GiB", HALF, {"rollout": sglang(2)}, {"trainer": (0,), "rollout-0": (1, 2)}),
    (
        "8x80GiB",
        SEVEN,
        {"trainer": {"world_size": 4}, "rollout": sglang(2, replicas=2)},
        {"trainer": (0, 1, 2, 3), "rollout-0": (4, 5), "rollout-1": (6, 7)},
    ),
    (
        "4x80GiB",
        HALF,
        {"trainer": {"world_size": 4}, "rollout": sglang(replicas=4, colocate=True)},
        {"trainer": (0, 1, 2, 3), **{worker(n): (n,) for n in range(4)}},
    ),
    (
        "4x80GiB",
        HALF,
        {"trainer": {"devices": "3"}, "rollout": {"devices": [1, 2], "replicas": 2}},
        {"trainer": (3,), "rollout-0": (1,), "rollout-1": (2,)},
    ),
    ("1x80GiB", HALF, {"rollout": {"devices": "cpu"}}, {"trainer": (0,), "rollout-0": ()}),
    ("1x80GiB", HALF, {"trainer": {"devices": "cpu"}}, {"trainer": (), "rollout-0": (0,)}),
    ("2xMIG:20GiB", HALF, {}, {"trainer": (0,), "rollout-0": (1,)}),
    (
        "1x80GiB",
        HALF,
        {"rollout": {"colocate": False}},
        "it needs 2 GPUs (trainer 1, 1 rollout worker with 1), and this machine has 1",
    ),
    (
        "2xMIG:20GiB",
        HALF,
        {"trainer": {"devices": "cpu"}, "rollout": sglang(2)},
        "it needs 2 GPUs (1 rollout worker with 2), and this machine has 2, slices of MIG, each of "
        "which computes alone",
    ),
    (
        "8x80GiB",
        SEVEN,
        {},
        "the trainer needs 142.1 GiB of each GPU, and the largest has 80 GiB; it fits with "
        "trainer.world_size: 2",
    ),
    (
        "1x80GiB",
        SEVEN,
        {},
        "the trainer needs 142.1 GiB of each GPU, and the largest has 80 GiB; it fits with "
        "trainer.lora: {}",
    ),
    (
        "8x24GiB",
        SEVEN,
        {"trainer": {"world_size": 2, "tokens_per_micro_batch": 1024}, "rollout": sglang()},
        "the trainer needs 61 GiB of each GPU and a rollout worker needs 31 GiB of each GPU, and "
        "the largest has 24 GiB; it fits with trainer.world_size: 6 and rollout.engine.tp: 2",
    ),
    (
        "8x24GiB",
        SEVEN,
        {"trainer": {"world_size": 4}, "rollout": sglang(replicas=4)},
        "the trainer needs 43 GiB of each GPU and a rollout worker needs 31 GiB of each GPU, and "
        "the largest has 24 GiB; it fits with trainer.lora: {} and rollout.engine.tp: 2 and "
        "rollout.replicas: 2",
    ),
    (
        "2x80GiB",
        HALF,
        {"trainer": {"devices": "5"}},
        "trainer.devices: there is no GPU 5 here; there are 0, 1",
    ),
    (
        "4x80GiB",
        HALF,
        {"trainer": {"devices": "0,1", "world_size": 3}},
        "trainer.devices: it names 2 GPUs of 3",
    ),
]


@pytest.mark.parametrize(("machine", "size", "sections", "expected"), GOLDEN)
def test_what_a_job_gets_on_a_machine(
    machine: str, size: ModelSize, sections: dict[str, Any], expected: Any
) -> None:
    planned = plan_of(job(**sections), described(machine), size)
    if isinstance(expected, str):
        assert planned.refusal == expected
        assert list(planned.lines())[-1] == f"refused: {expected}"
    else:
        assert planned.placement is not None, planned.refusal
        assert planned.placement.roles == expected
        assert planned.document()["roles"] == {r: list(n) for r, n in expected.items()}


def test_a_plan_says_what_is_unused_and_which_fields_would_use_it() -> None:
    lines = list(plan_of(job(), described("8xH100:80GiB"), HALF).lines())
    assert lines[0] == "devices: 8 GPUs (H100, 80 GiB each)"
    assert "GPU 0: trainer (at most 12.2 GiB of 80 GiB)" in lines
    assert lines[-1].startswith(
        "warning: GPUs 2, 3, 4, 5, 6, 7 of 8 would be unused; with trainer."
    )


def test_colocated_engines_leave_room_for_the_trainer() -> None:
    devices = described("1x80GiB")
    planned = plan_of(job(rollout=sglang(replicas=2)), devices, HALF)
    assert planned.placement is not None
    assert planned.placement.colocated
    share = memory_share(planned.demand, planned.placement, devices)
    assert share is not None
    assert planned.demand.trainer.num_bytes + 2 * share * 80 * GIB < 80 * GIB
    apart = plan_of(job(), described("2x80GiB"), HALF).placement
    assert apart is not None
    assert memory_share(planned.demand, apart, devices) is None


def test_a_job_waits_for_what_others_have_but_does_not_colocate_because_of_it() -> None:
    lack = place(demand_of(job(), HALF), described("2x80GiB"), taken={1})
    assert isinstance(lack, Lack)
    assert lack.possible
    assert lack.text == (
        "it needs 2 GPUs (trainer 1, 1 rollout worker with 1), and 1 of 2 is free (GPU 0)"
    )


needs = st.builds(DeviceNeed, st.integers(0, 3), st.integers(0, 100).map(lambda n: n * GIB))
demands = st.builds(
    DeviceDemand, needs, needs, st.integers(1, 3), st.sampled_from([None, True, False])
)
cards = st.tuples(
    st.sampled_from([10 * GIB, 24 * GIB, 80 * GIB]),
    st.sampled_from([0, 0, 5 * GIB]),
    st.sampled_from([False, False, True]),
)


@given(demands, st.lists(cards, max_size=6), st.sets(st.integers(0, 5)))
def test_no_gpu_is_given_twice_or_beyond_its_memory(
    demand: DeviceDemand, found: list[tuple[int, int, bool]], taken: set[int]
) -> None:
    devices = [
        Device(n, str(n), "G", size, used, alone) for n, (size, used, alone) in enumerate(found)
    ]
    placement = place(demand, devices, taken=taken)
    if isinstance(placement, Lack):
        assert placement.text
        if placement.possible:
            assert isinstance(place(demand, devices), Placement)
        return
    if not devices:
        assert placement.used == set()
        return
    room = {device.index: device.free_bytes for device in devices}
    assert placement.used <= room.keys() - taken
    for role, indices in placement.roles.items():
        need = demand.trainer if role == TRAINER else demand.rollout
        assert len(indices) == need.count == len(set(indices))
        assert need.count <= 1 or not any(devices[n].is_slice for n in indices)
        for index in indices:
            room[index] -= need.num_bytes
    assert min(room.values()) >= 0
    given_out = [n for indices in placement.roles.values() for n in indices]
    assert placement.colocated or len(given_out) == len(set(given_out))
    another = more(demand, devices, taken=taken, own=placement)
    assert another is None or not {*another} & placement.used


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.lists(st.sampled_from([10, 24, 80]), min_size=1, max_size=5),
)
def test_a_job_is_refused_only_if_no_assignment_fits(sizes: list[int], cards: list[int]) -> None:
    trainer, *workers = (size * GIB for size in sizes)
    demand = DeviceDemand(
        DeviceNeed(1, trainer), DeviceNeed(1, max(workers, default=0)), len(workers), colocate=False
    )
    devices = [Device(n, str(n), f"G{size}", size * GIB) for n, size in enumerate(cards)]
    wanted = [trainer, *([max(workers)] * len(workers) if workers else [])]
    fits = any(
        all(need <= device.num_bytes for need, device in zip(wanted, order, strict=False))
        for order in permutations(devices)
        if len(order) >= len(wanted)
    )
    assert isinstance(place(demand, devices), Placement) == fits


@pytest.mark.parametrize("text", ["", "8", "80GB", "x80GiB", "0x80GiB", "2x80GiB+", "9999x1GiB"])
def test_a_wrong_description_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write such as 8x80GiB"):
        described(text)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2, 3]), ("", []), ("-1", []), ("2,0", [2, 0]), ("1,9,2", [1]), ("none", [])],
)
def test_the_environment_restricts_the_devices(visible: str | None, indices: list[int]) -> None:
    environ = {"PACELINE_DEVICES": "4x80GiB"}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert [device.index for device in devices_here(environ)] == indices


def test_the_gpus_of_an_engine_are_its_parallel_sizes() -> None:
    assert engine_gpus({"tp": 4, "dp": 2, "ep": 8}) == 8
    assert engine_gpus({"tp": "many"}) == 1
    simulated = demand_of(job(rollout={"engine": {"kind": "simulated"}}), HALF)
    assert (simulated.trainer.count, simulated.rollout.count) == (1, 0)


@pytest.mark.parametrize("devices", ["gpu", "0,", "-1", "0-3", True, 1.5])
def test_devices_of_a_job_file_are_indices_or_a_word(devices: Any) -> None:
    with pytest.raises(Exception, match=r"trainer\.devices"):
        job(trainer={"devices": devices})
