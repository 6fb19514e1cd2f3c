"""Continuous batching: requests join and leave between decode steps. No threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.errors import PacelineError
from paceline.interfaces import Emission, Generation
from paceline.logs import Log
from paceline_rollout.activation import Activation, Gate, Line, Swap
from paceline_rollout.engines.base import (
    Decode,
    Limits,
    Snapshot,
    emit,
    problem,
    refusal,
    stop_in,
    stop_window,
    version_gone,
)
from paceline_rollout.engines.torch.cache import Group, SlotCache
from paceline_rollout.engines.torch.entrance import Entrance
from paceline_rollout.engines.torch.model import Policy
from paceline_rollout.engines.torch.rows import BUFFER, Rows, Running, running
from paceline_rollout.engines.torch.weights import Weights

log = Log("engine")


class Scheduler:
    """All requests of an engine. `tick` does one round and leaves what came out in `out`."""

    def __init__(
        self,
        *,
        policy: Policy,
        max_context: int,
        max_concurrent: int,
        prefill_tokens: int,
        cache_bytes: int,
        least_shared: int,
        decode: Decode | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.gate = Gate()
        self.out: list[Emission] = []
        self.tokens_generated = 0
        self.limits = Limits(policy.vocab_size, max_context, stop_strings=decode is not None)
        self._policy = policy
        self._decode_text = decode
        self._line: Line[Running] = Line(self.gate)
        self._cache = SlotCache()
        self._rows = Rows(most=max_concurrent, device=policy.device)
        self._most = max(cache_bytes // policy.token_bytes, 1)
        self._entrance = Entrance(
            policy=policy,
            rows=self._rows,
            cache=self._cache,
            max_concurrent=max_concurrent,
            prefill_tokens=prefill_tokens,
            most=self._most,
            least_shared=least_shared,
        )
        self._groups: list[Group] | None = None
        self._since_flush = 0

    @property
    def num_running(self) -> int:
        """Requests that are being decoded."""
        return len(self._rows)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that were computed; those that were shared count once."""
        return self._entrance.tokens_done

    @property
    def cached_tokens(self) -> int:
        """Tokens for whose keys and values there is memory at this moment."""
        return self._entrance.memory

    @property
    def adopted_tokens(self) -> int:
        """Tokens of prompts that a known prefix made unnecessary to compute."""
        return self._entrance.tokens_adopted

    @property
    def kv_ratio(self) -> float:
        """Share of the memory for keys and values that is in use."""
        return self._entrance.memory / self._most

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._line)

    @property
    def busy(self) -> bool:
        """Whether another tick would do something."""
        return bool(self._rows) or self._swap_due() or any(True for _ in self._line.startable())

    def add(self, batch: Sequence[Generation]) -> None:
        """Queue requests; bad ones end here."""
        for request in batch:
            if wrong := problem(request, self.limits):
                self.out.append(refusal(request.request_id, "INVALID_ARGUMENT", wrong))
            elif not self._line.add(running(request, self.limits.max_context, since=self._clock())):
                self.out.append(version_gone(request, self.gate.version))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with what they have."""
        wanted = set(request_ids)
        for request_id in request_ids:
            if self._line.pop(request_id) is not None:
                self.out.append(emit(request_id, (), (), version=-1, reason="abort"))
        rows = [i for i, one in enumerate(self._rows.owners) if one.request_id in wanted]
        self._end(rows, ["abort"] * len(rows), [""] * len(rows))

    def abort_all(self) -> None:
        """End everything with what it has."""
        waiting = [one.request_id for one in self._line.clear()]
        self.out.extend(emit(name, (), (), version=-1, reason="abort") for name in waiting)
        rows = list(range(len(self._rows)))
        self._end(rows, ["abort"] * len(rows), [""] * len(rows))

    def propose(self, swap: Swap) -> None:
        """Swap when the activation allows it."""
        self.gate.propose(swap)

    def expect(self, swap: Swap) -> None:
        """A swap is to be prepared; until it is, nothing waits for it."""
        self.gate.expect(swap)

    def prepare(self, snapshot: Snapshot) -> Weights:
        """What a swap is done with; may run in any thread. Raises `InvalidError`."""
        return self._policy.prepare(snapshot)

    def prepared(self, swap: Swap, weights: Weights) -> None:
        """A swap that was expected waits for its moment from now on."""
        swap.snapshot = weights
        self.gate.propose(swap)

    def give_up(self, swap: Swap, error: PacelineError) -> None:
        """A swap that was expected cannot be done; the old version stays."""
        self.gate.give_up(swap, error)

    def swap(self) -> bool:
        """Do the swap that is due, if one is; whether there is another version now."""
        if not self._swap_due():
            return False
        version = self.gate.version
        self._swap()
        return self.gate.version != version

    def tick(self) -> None:
        """Swap if due, let waiting requests join, decode one token for all."""
        self.swap()
        self._admit()
        if self._rows:
            self._step()

    def flush(self) -> None:
        """Emit what running requests have so far."""
        self._since_flush = 0
        tokens, logprobs = self._rows.read(slice(0, len(self._rows)))
        for one, some, their in zip(self._rows.owners, tokens, logprobs, strict=True):
            if some:
                one.emitted.extend(some)
                self.out.append(emit(one.request_id, some, their, version=self.gate.version))

    def fail(self, text: str) -> None:
        """End everything after an error inside the engine."""
        open_ones = [*self._rows.clear(), *self._line.clear()]
        for name in dict.fromkeys(one.request_id for one in open_ones):
            self.out.append(refusal(name, "INTERNAL", text))
        self._entrance.clear()
        self.gate.finish(PacelineError(text))

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] under the active version."""
        return self._policy.score(tokens)

    # swapping -------------------------------------------------------------------------------

    def _swap_due(self) -> bool:
        if self.gate.pending is None:
            return False
        held = sum(one.request.pinned_version >= 0 for one in self._rows.owners)
        return self.gate.due(running=len(self._rows), pinned=held + self._line.num_pinned)

    def _swap(self) -> None:
        swap = self.gate.pending
        assert swap is not None
        # Each emission carries one version, so what the old one sampled goes out before.
        self.flush()
        try:
            self._policy.exchange(swap.snapshot)
        except PacelineError as error:
            self.gate.finish(error)
            return
        self._entrance.forget()
        if swap.activation is Activation.INTERRUPT:
            for one in reversed(self._rows.clear()):
                one.again()
                self._line.add(one, first=True)
        self.gate.finish()
        for one in self._line.swapped():
            self.out.append(version_gone(one.request, self.gate.version))

    # stepping -------------------------------------------------------------------------------

    def _admit(self) -> None:
        joined = self._entrance.admit(self._line.startable(), self._clock)
        # Not before: what fails meanwhile must still be found, to be refused.
        for one in joined:
            self._line.pop(one.request_id)
        if joined:
            self._groups = None

    def _step(self) -> None:
        rows = self._rows
        if self._groups is None:
            self._groups = rows.groups()
        part = slice(0, len(rows))
        positions = rows.length[part] - 1
        at = positions - rows.base[part]
        logits = self._policy.decode(rows.token[part], positions, at, self._cache, self._groups)
        stopped, failed = rows.advance(logits)
        self.tokens_generated += len(rows)
        ended = stopped | failed | (rows.length[part] >= rows.limit[part])
        matched = self._match_strings() if rows.with_strings else {}
        if matched or bool(ended.any()):
            self._end_some(ended, stopped=stopped, failed=failed, matched=matched)
        self._since_flush += 1
        if self._since_flush >= BUFFER:
            self.flush()

    def _end_some(
        self, ended: Tensor, *, stopped: Tensor, failed: Tensor, matched: dict[int, str]
    ) -> None:
        chosen = ended.nonzero().squeeze(1)
        places: list[int] = chosen.tolist()
        stops: list[bool] = stopped[chosen].tolist()
        fails: list[bool] = failed[chosen].tolist()
        last: list[int] = self._rows.token[chosen].tolist()
        reasons = {row: ("stop", text) for row, text in matched.items()}
        for row, stop, fail, token in zip(places, stops, fails, last, strict=True):
            if fail:
                reasons[row] = ("error", "")
            elif stop:
                reasons[row] = ("stop", str(token))
            else:
                reasons.setdefault(row, ("length", ""))
        if any(fails):
            self._cache.wipe([row for row, fail in zip(places, fails, strict=True) if fail])
        rows = sorted(reasons)
        self._end(rows, [reasons[row][0] for row in rows], [reasons[row][1] for row in rows])

    def _match_strings(self) -> dict[int, str]:
        """Rows whose newest token completes one of their stop strings."""
        decode, found = self._decode_text, dict[int, str]()
        tokens: list[int] = self._rows.token[: len(self._rows)].tolist()
        for row, one in enumerate(self._rows.owners):
            strings = one.request.sampling.stop_strings
            if not strings or decode is None:
                continue
            keep = stop_window(strings)
            one.recent = [*one.recent[-keep:], tokens[row]]
            text = decode(one.recent)
            hit = stop_in(text, strings)
            if hit:
                found[row] = hit
        return found

    def _end(self, rows: list[int], reasons: list[str], matched: list[str]) -> None:
        if not rows:
            return
        tokens, logprobs = self._rows.read(rows)
        version = self.gate.version
        for place, row in enumerate(rows):
            one, reason = self._rows.owners[row], reasons[place]
            name = one.request_id
            if reason == "error":
                text = f"log-probs of version {version} are not finite"
                self.out.append(refusal(name, "INTERNAL", text))
                continue
            some, their = tokens[place], logprobs[place]
            end = emit(name, some, their, version=version, reason=reason, matched=matched[place])
            waits = {"queue_s": one.begun - one.since, "prefill_s": one.joined - one.begun}
            self.out.append(replace(end, **waits))
        moved = self._rows.remove(rows)
        self._groups = None
        if moved is not None:
            self._cache.move(*moved)
