"""Prompts that are shared, computed in pieces, given up and let go of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.plugins import EngineRequest
from paceline_rollout.activation import Activation, Swap
from paceline_rollout.engines.torch.cache import Block, Prefix
from paceline_rollout.engines.torch.model import TorchModel
from paceline_rollout.engines.torch.prefixes import PADDING, Prefixes, portions
from paceline_rollout.engines.torch.scheduler import Scheduler

Ask = Callable[..., EngineRequest]
Make = Callable[..., Scheduler]
TOKEN_BYTES = 2 * 4 * 2 * 2 * 8  # keys and values, float32, layers, heads, size
LONG = [(7 * i + 3) % 37 for i in range(40)]


@pytest.fixture(autouse=True)
def as_in_the_engine() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def scheduler_of(tmp_path: Path, model_of: Any, snapshot_of: Any) -> Make:
    def made(
        kind: str = "llama", policy: type[TorchModel] = TorchModel, **options: Any
    ) -> Scheduler:
        model = model_of(kind)
        model.config.save_pretrained(tmp_path)
        knobs: dict[str, Any] = {"prefill_tokens": 512, "cache_bytes": 1 << 24, "least_shared": 16}
        scheduler = Scheduler(
            policy=policy(model_dir=tmp_path, dtype="float32", max_context=100, device="cpu"),
            max_context=100,
            max_concurrent=16,
            decode=None,
            **(knobs | options),
        )
        scheduler.propose(Swap(scheduler.prepare(snapshot_of(model)), Activation.IN_FLIGHT))
        scheduler.tick()
        return scheduler

    return made


def finish(scheduler: Scheduler, after: Callable[[], None] = lambda: None) -> None:
    """Tick to the end."""
    for _ in range(1000):
        if not scheduler.busy:
            return
        scheduler.tick()
        after()
    pytest.fail("it goes on for ever")


def run(scheduler: Scheduler) -> dict[str, tuple[list[int], list[float]]]:
    """Tick to the end; tokens and log-probs of each request."""
    finish(scheduler)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for one in scheduler.out:
        tokens, logprobs = found.setdefault(one.request_id, ([], []))
        tokens.extend(one.tokens)
        logprobs.extend(one.logprobs)
    return found


def reference(model: Any, prompt: Sequence[int], tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma2"])
def test_samples_that_come_one_after_another_share_a_long_prompt(
    kind: str, scheduler_of: Make, request_of: Ask, model_of: Any
):
    scheduler, prompts = scheduler_of(kind), {"a": LONG, "b": LONG[1:], "c": [1, 2]}
    asked = {f"{name}{i}": (name, i) for i in range(4) for name in prompts}
    for name, (group, i) in asked.items():
        tokens = prompts[group]
        scheduler.add([request_of(name, tokens, seed=i, max_tokens=5 + 3 * i)])
        scheduler.tick()
    found = run(scheduler)
    assert scheduler.prompt_tokens == sum(len(p) - 1 for p in prompts.values()) + len(asked)
    for name, (group, i) in asked.items():
        tokens, logprobs = found[name]
        assert len(tokens) == 5 + 3 * i
        wanted = reference(model_of(kind), prompts[group], tokens)
        assert logprobs == pytest.approx(wanted, abs=1e-5)


def test_sharing_changes_no_token(scheduler_of: Make, request_of: Ask):
    asked = [request_of(str(i), LONG, seed=i, max_tokens=12) for i in range(6)]
    found: list[Any] = []
    for least_shared in (0, 16, 64):
        scheduler = scheduler_of(least_shared=least_shared)
        scheduler.add(asked)
        found.append(run(scheduler))
        each = len(LONG) - 1
        assert scheduler.prompt_tokens == (each if least_shared else 6 * each) + 6
    for other in found[1:]:
        for name, (tokens, logprobs) in found[0].items():
            assert other[name][0] == tokens
            assert other[name][1] == pytest.approx(logprobs, abs=1e-5)


def test_a_prompt_is_kept_for_the_next_turn(scheduler_of: Make, request_of: Ask, model_of: Any):
    scheduler = scheduler_of()
    scheduler.add([request_of("first", LONG, seed=1, max_tokens=6)])
    tokens = run(scheduler)["first"][0]
    before = scheduler.prompt_tokens
    turn = [*LONG, *tokens, 4, 5, 6]
    scheduler.add([request_of("second", turn, seed=2, max_tokens=6)])
    tokens, logprobs = run(scheduler)["second"]
    assert scheduler.prompt_tokens - before == len(turn) - (len(LONG) - 1)
    assert logprobs == pytest.approx(reference(model_of(), turn, tokens), abs=1e-5)


@pytest.mark.parametrize("activation", [Activation.IN_FLIGHT, Activation.INTERRUPT])
def test_a_swap_ends_sharing_with_what_the_old_version_computed(
    activation: Activation, scheduler_of: Make, request_of: Ask, model_of: Any, snapshot_of: Any
):
    new = model_of(seed=1)
    scheduler = scheduler_of()
    scheduler.add([request_of("old", LONG, seed=1, max_tokens=30)])
    scheduler.tick()
    scheduler.propose(Swap(scheduler.prepare(snapshot_of(new, version=1)), activation))
    scheduler.add([request_of("new", LONG, seed=2, max_tokens=8)])
    scheduler.tick()
    scheduler.add([request_of("late", LONG, seed=3, max_tokens=8)])
    found = run(scheduler)
    for name in ("new", "late"):
        tokens, logprobs = found[name]
        assert logprobs == pytest.approx(reference(new, LONG, tokens), abs=1e-5)
    again = activation is Activation.INTERRUPT
    tokens, logprobs = found["old"]
    theirs = pytest.approx(reference(new, LONG, tokens)[1:], abs=1e-5)
    assert (logprobs[1:] == theirs) is again


def test_chunked_prefill_equals_full_prefill_and_others_continue(
    scheduler_of: Make, request_of: Ask, model_of: Any
):
    scheduler = scheduler_of(prefill_tokens=8)
    scheduler.add([request_of("short", [1, 2], seed=1, max_tokens=20)])
    scheduler.tick()
    scheduler.add([request_of("long", LONG, seed=2, max_tokens=4)])
    for done in range(1, 5):
        scheduler.tick()
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
        assert scheduler.tokens_generated == 1 + done
        assert scheduler.prompt_tokens == 2 + 8 * done
    scheduler.tick()
    assert scheduler.num_running == 2
    for name, (tokens, logprobs) in run(scheduler).items():
        prompt = LONG if name == "long" else [1, 2]
        assert logprobs == pytest.approx(reference(model_of(), prompt, tokens), abs=1e-5)


def test_an_abort_gives_up_an_unfinished_prefill(scheduler_of: Make, request_of: Ask):
    scheduler = scheduler_of(prefill_tokens=8)
    scheduler.add([request_of("gone", LONG), request_of("next", [1, 2, 3], max_tokens=3)])
    scheduler.tick()
    assert scheduler.cached_tokens >= len(LONG) - 1
    scheduler.abort(["gone"])
    assert scheduler.out[-1].finish_reason == "abort"
    found = run(scheduler)
    assert len(found["next"][0]) == 3
    assert scheduler.prompt_tokens == 8 + 3
    scheduler.add([request_of("back", LONG, max_tokens=2)])
    assert len(run(scheduler)["back"][0]) == 2
    assert scheduler.prompt_tokens == 8 + 3 + len(LONG)


def test_a_swap_restarts_an_unfinished_prefill(
    scheduler_of: Make, request_of: Ask, model_of: Any, snapshot_of: Any
):
    new = model_of(seed=1)
    scheduler = scheduler_of(prefill_tokens=8)
    scheduler.add([request_of("a", LONG, seed=1)])
    scheduler.tick()
    scheduler.propose(Swap(scheduler.prepare(snapshot_of(new, version=1)), Activation.IN_FLIGHT))
    tokens, logprobs = run(scheduler)["a"]
    assert logprobs == pytest.approx(reference(new, LONG, tokens), abs=1e-5)


class Failing(TorchModel):
    """Fails in the second piece of a prompt."""

    def prefill(self, block: Block, tokens: Sequence[Sequence[int]]) -> None:
        """The first piece only."""
        if block.done:
            raise MemoryError
        super().prefill(block, tokens)


def test_a_failed_piece_refuses_all_and_frees_the_memory(scheduler_of: Make, request_of: Ask):
    scheduler = scheduler_of(policy=Failing, prefill_tokens=30)
    scheduler.add([request_of("long", LONG), request_of("short", [1, 2])])
    scheduler.tick()
    with pytest.raises(MemoryError):
        scheduler.tick()
    scheduler.fail("no memory")
    ends = {one.request_id: one.error_code for one in scheduler.out if one.finish_reason}
    assert ends == {"long": "INTERNAL", "short": "INTERNAL"}
    assert scheduler.cached_tokens == 0
    scheduler.add([request_of("next", [1, 2], max_tokens=3)])
    assert len(run(scheduler)["next"][0]) == 3


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), most=st.integers(100, 900), least=st.sampled_from([0, 16]))
def test_memory_stays_within_its_bound(
    scheduler_of: Make, request_of: Ask, data: st.DataObject, most: int, least: int
):
    scheduler = scheduler_of(cache_bytes=TOKEN_BYTES * most, least_shared=least)
    asked = data.draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)),
            min_size=1,
            max_size=10,
        )
    )

    def check() -> None:
        assert scheduler.num_running <= 1 or scheduler.cached_tokens <= most

    for i, (shift, length, new, ticks) in enumerate(asked):
        prompt = [(5 * j + shift) % 37 for j in range(length)]
        scheduler.add([request_of(str(i), prompt, seed=i, max_tokens=new)])
        for _ in range(ticks):
            scheduler.tick()
            check()
    finish(scheduler, check)
    assert sum(one.finish_reason == "length" for one in scheduler.out) == len(asked)


def test_weights_that_are_not_numbers_leave_nothing_behind(
    scheduler_of: Make, request_of: Ask, model_of: Any, snapshot_of: Any
):
    scheduler, broken = scheduler_of(), model_of()
    with torch.no_grad():
        broken.model.layers[0].self_attn.k_proj.weight.fill_(torch.nan)
    bad = scheduler.prepare(snapshot_of(broken, version=1))
    scheduler.propose(Swap(bad, Activation.IN_FLIGHT))
    scheduler.add([request_of(str(i), LONG[:15], max_tokens=20) for i in range(3)])
    run(scheduler)
    assert {one.error_code for one in scheduler.out} == {"INTERNAL"}
    scheduler.out.clear()
    good = scheduler.prepare(snapshot_of(model_of(), version=2))
    scheduler.propose(Swap(good, Activation.IN_FLIGHT))
    scheduler.add([request_of("good", [1, 2], seed=1, max_tokens=20)])
    tokens, logprobs = run(scheduler)["good"]
    assert logprobs == pytest.approx(reference(model_of(), [1, 2], tokens), abs=1e-5)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "get", "trim"]), st.integers(0, 5), st.integers(0, 60)),
        max_size=30,
    )
)
def test_blocks_go_in_order_of_their_last_use(steps: list[tuple[str, int, int]]):
    prefixes, order, alive = Prefixes(), list[int](), dict[int, Block]()
    for kind, number, most in steps:
        if kind == "add" and number not in alive:
            alive[number] = Block(1, 10)
            prefixes.add((number,), Prefix(alive[number], 0, 10))
            order.append(number)
        elif kind == "get" and prefixes.get((number,)) is not None:
            order.remove(number)
            order.append(number)
        elif kind == "trim":
            kept = {id(block) for n, block in alive.items() if n == number}
            prefixes.trim(most, kept)
            for old in [n for n in order if n != number]:
                if 10 * len(order) > most:
                    order.remove(old)
                    del alive[old]
        assert prefixes.size == 10 * len(order)
        assert {n for n in range(6) if id(alive.get(n)) in prefixes} == set(order)


@given(lengths=st.lists(st.integers(1, 600), max_size=30))
def test_batches_are_complete_with_little_padding(lengths: list[int]):
    parts = portions([(i, (0,) * length) for i, length in enumerate(lengths)])
    assert {name for part in parts for name, _ in part} == set(range(len(lengths)))
    assert sum(map(len, parts)) == len(lengths)
    for part in parts:
        sizes = [len(tokens) for _, tokens in part]
        assert max(sizes) <= PADDING + 1.25 * min(sizes)
