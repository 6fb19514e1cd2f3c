"""Continuous batching: requests join and leave between decode steps. No threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.enums import FinishReason
from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import (
    EngineLimits,
    EngineOutput,
    EngineRequest,
    WeightSnapshot,
    error_output,
    request_problem,
)
from paceline_rollout.activation import Activation, Gate, RequestQueue, Swap
from paceline_rollout.engines.base import Decode, emit, stop_in, stop_window, version_gone
from paceline_rollout.engines.torch.cache import PrefixGroup, SlotCache
from paceline_rollout.engines.torch.model import TorchModel
from paceline_rollout.engines.torch.prefill import PrefillScheduler
from paceline_rollout.engines.torch.rows import BUFFER, Rows, Running, running
from paceline_rollout.engines.torch.weights import Weights

log = Log("engine")


class Scheduler:
    """All requests of an engine. `tick` does one round and appends outputs to `out`."""

    def __init__(
        self,
        *,
        policy: TorchModel,
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
        self.out: list[EngineOutput] = []
        self.tokens_generated = 0
        self.limits = EngineLimits(policy.vocab_size, max_context, stop_strings=decode is not None)
        self._policy = policy
        self._decode_text = decode
        self._queue: RequestQueue[Running] = RequestQueue(self.gate)
        self._cache = SlotCache()
        self._rows = Rows(max_rows=max_concurrent, device=policy.device)
        self._max_cached = max(cache_bytes // policy.token_bytes, 1)
        self._prefill = PrefillScheduler(
            policy=policy,
            rows=self._rows,
            cache=self._cache,
            max_concurrent=max_concurrent,
            prefill_tokens=prefill_tokens,
            max_tokens=self._max_cached,
            least_shared=least_shared,
        )
        self._groups: list[PrefixGroup] | None = None
        self._since_flush = 0

    @property
    def num_running(self) -> int:
        """Number of requests that are being decoded."""
        return len(self._rows)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed so far; shared ones count once."""
        return self._prefill.tokens_done

    @property
    def cached_tokens(self) -> int:
        """Tokens for whose keys and values memory is allocated."""
        return self._prefill.memory

    @property
    def adopted_tokens(self) -> int:
        """Prompt tokens found in a cached prefix, and so not computed."""
        return self._prefill.tokens_adopted

    @property
    def kv_ratio(self) -> float:
        """Share of the memory for keys and values that is in use."""
        return self._prefill.memory / self._max_cached

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether there is work for another tick."""
        return bool(self._rows) or self._swap_due() or any(True for _ in self._queue.startable())

    def add(self, batch: Sequence[EngineRequest]) -> None:
        """Queue requests; invalid ones end at once."""
        for request in batch:
            if problem := request_problem(request, self.limits):
                self.out.append(error_output(request.request_id, "INVALID_ARGUMENT", problem))
            elif not self._queue.add(
                running(request, self.limits.max_context, submitted_at=self._clock())
            ):
                self.out.append(version_gone(request, self.gate.version))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with the tokens they have."""
        wanted = set(request_ids)
        for request_id in request_ids:
            if self._queue.pop(request_id) is not None:
                self.out.append(emit(request_id, (), (), version=-1, reason=FinishReason.ABORT))
        rows = [i for i, entry in enumerate(self._rows.owners) if entry.request_id in wanted]
        self._end(rows, [FinishReason.ABORT] * len(rows), [""] * len(rows))

    def abort_all(self) -> None:
        """End all requests with the tokens they have."""
        waiting = [entry.request_id for entry in self._queue.clear()]
        self.out.extend(
            emit(name, (), (), version=-1, reason=FinishReason.ABORT) for name in waiting
        )
        rows = list(range(len(self._rows)))
        self._end(rows, [FinishReason.ABORT] * len(rows), [""] * len(rows))

    def propose(self, swap: Swap) -> None:
        """Swap as soon as the activation allows it."""
        self.gate.propose(swap)

    def expect(self, swap: Swap) -> None:
        """Announce a swap that will be prepared; until then, no request waits for it."""
        self.gate.expect(swap)

    def prepare(self, snapshot: WeightSnapshot) -> Weights:
        """Prepare weights for a swap; may run in any thread. Raises `InvalidError`."""
        return self._policy.prepare(snapshot, pack=bool(self._rows))

    def prepared(self, swap: Swap, weights: Weights) -> None:
        """Make an expected swap the pending one."""
        swap.snapshot = weights
        self.gate.propose(swap)

    def give_up(self, swap: Swap, error: PacelineError) -> None:
        """Fail an expected swap that cannot be prepared; the old version stays."""
        self.gate.give_up(swap, error)

    def swap(self) -> bool:
        """Do the pending swap if it is due; returns whether the version has changed."""
        if not self._swap_due():
            return False
        version = self.gate.version
        self._swap()
        return self.gate.version != version

    def tick(self) -> None:
        """Swap if due, admit waiting requests, decode one token for each running one."""
        self.swap()
        self._admit()
        if self._rows:
            self._step()

    def flush(self) -> None:
        """Emit the buffered tokens of running requests."""
        self._since_flush = 0
        tokens, logprobs = self._rows.read(slice(0, len(self._rows)))
        for entry, new, new_logprobs in zip(self._rows.owners, tokens, logprobs, strict=True):
            if new:
                entry.emitted.extend(new)
                output = emit(entry.request_id, new, new_logprobs, version=self.gate.version)
                self.out.append(output)

    def fail(self, text: str) -> None:
        """End all requests after an internal error."""
        open_ones = [*self._rows.clear(), *self._queue.clear()]
        for name in dict.fromkeys(entry.request_id for entry in open_ones):
            self.out.append(error_output(name, "INTERNAL", text))
        self._prefill.clear()
        self.gate.finish(PacelineError(text))

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] under the active version."""
        return self._policy.score(tokens)

    def unequal(self, snapshot: WeightSnapshot) -> list[str]:
        """The names of tensors that are not those of a snapshot."""
        return self._policy.unequal(snapshot)

    # swapping -------------------------------------------------------------------------------

    def _swap_due(self) -> bool:
        if self.gate.pending is None:
            return False
        pinned = sum(entry.request.pinned_version >= 0 for entry in self._rows.owners)
        return self.gate.due(running=len(self._rows), pinned=pinned + self._queue.num_pinned)

    def _swap(self) -> None:
        swap = self.gate.pending
        assert swap is not None
        # An output has one version, so tokens of the old version are emitted before the swap.
        self.flush()
        try:
            self._policy.exchange(swap.snapshot)
        except PacelineError as error:
            self.gate.finish(error)
            return
        self._prefill.forget()
        if swap.activation is Activation.INTERRUPT:
            for entry in reversed(self._rows.clear()):
                entry.restart()
                self._queue.add(entry, first=True)
        self.gate.finish()
        for entry in self._queue.swapped():
            self.out.append(version_gone(entry.request, self.gate.version))

    # stepping -------------------------------------------------------------------------------

    def _admit(self) -> None:
        joined = self._prefill.admit(self._queue.startable(), self._clock)
        # Only after the prefill: if that fails, `fail` still finds its requests in the queue.
        for entry in joined:
            self._queue.pop(entry.request_id)
        if joined:
            self._groups = None

    def _step(self) -> None:
        rows = self._rows
        if self._groups is None:
            self._groups = rows.groups()
        part = slice(0, len(rows))
        positions = rows.length[part] - 1
        columns = positions - rows.base[part]
        logits = self._policy.decode(
            rows.token[part], positions, columns, self._cache, self._groups
        )
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
        ended_rows: list[int] = chosen.tolist()
        stops: list[bool] = stopped[chosen].tolist()
        fails: list[bool] = failed[chosen].tolist()
        last: list[int] = self._rows.token[chosen].tolist()
        reasons = {row: (FinishReason.STOP, text) for row, text in matched.items()}
        for row, stop, fail, token in zip(ended_rows, stops, fails, last, strict=True):
            if fail:
                reasons[row] = (FinishReason.ERROR, "")
            elif stop:
                reasons[row] = (FinishReason.STOP, str(token))
            else:
                reasons.setdefault(row, (FinishReason.LENGTH, ""))
        if any(fails):
            self._cache.wipe([row for row, fail in zip(ended_rows, fails, strict=True) if fail])
        rows = sorted(reasons)
        self._end(rows, [reasons[row][0] for row in rows], [reasons[row][1] for row in rows])

    def _match_strings(self) -> dict[int, str]:
        """Rows whose newest token completes one of their stop strings."""
        decode, found = self._decode_text, dict[int, str]()
        tokens: list[int] = self._rows.token[: len(self._rows)].tolist()
        for row, entry in enumerate(self._rows.owners):
            strings = entry.request.sampling.stop_strings
            if not strings or decode is None:
                continue
            keep = stop_window(strings)
            entry.recent = [*entry.recent[-keep:], tokens[row]]
            text = decode(entry.recent)
            match = stop_in(text, strings)
            if match:
                found[row] = match
        return found

    def _end(self, rows: list[int], reasons: list[FinishReason], matched: list[str]) -> None:
        if not rows:
            return
        tokens, logprobs = self._rows.read(rows)
        version = self.gate.version
        for i, row in enumerate(rows):
            entry, reason = self._rows.owners[row], reasons[i]
            name = entry.request_id
            if reason is FinishReason.ERROR:
                text = f"log-probs of version {version} are not finite"
                self.out.append(error_output(name, "INTERNAL", text))
                continue
            end = emit(
                name, tokens[i], logprobs[i], version=version, reason=reason, matched=matched[i]
            )
            durations = {
                "queue_s": entry.prefill_at - entry.submitted_at,
                "prefill_s": entry.decode_at - entry.prefill_at,
            }
            self.out.append(replace(end, **durations))
        moved = self._rows.remove(rows)
        self._groups = None
        if moved is not None:
            self._cache.move(*moved)
