"""Continuous batching: requests join and leave between decode steps. No threads, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.interfaces import Emission, Generation
from paceline.logs import Log
from paceline_rollout.activation import Activation, Gate, Line, Swap
from paceline_rollout.engines.base import Limits, emit, problem, refusal, version_gone
from paceline_rollout.engines.torch.cache import SlotCache
from paceline_rollout.engines.torch.model import Policy
from paceline_rollout.engines.torch.rows import BUFFER, Rows, Running, running

Decode = Callable[[list[int]], str]
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
        decode: Decode | None,
    ) -> None:
        self.gate = Gate()
        self.out: list[Emission] = []
        self.tokens_generated = 0
        self.prompt_tokens = 0
        self.limits = Limits(policy.vocab_size, max_context, stop_strings=decode is not None)
        self._policy = policy
        self._max_concurrent = max_concurrent
        self._prefill_tokens = prefill_tokens
        self._cache_tokens = max(cache_bytes // policy.token_bytes, 1)
        self._decode_text = decode
        self._line: Line[Running] = Line(self.gate)
        self._cache = SlotCache()
        self._rows = Rows(most=max_concurrent, device=policy.device)
        self._since_flush = 0

    @property
    def num_running(self) -> int:
        """Requests that are being decoded."""
        return len(self._rows)

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
            elif not self._line.add(running(request, self.limits.max_context)):
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

    def tick(self) -> None:
        """Swap if due, let waiting requests join, decode one token for all."""
        if self._swap_due():
            self._swap()
        self._admit()
        if self._rows:
            rows = len(self._rows)
            positions = self._rows.length[:rows] - 1
            self._cache.reserve(0, self._columns(int(positions.max()) + 1))
            logits = self._policy.decode(self._rows.token[:rows], positions, self._cache)
            self._advance(0, logits)

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
        self._cache.clear()
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
            self._policy.load(swap.snapshot)
        except PacelineError as error:
            self.gate.finish(error)
            return
        if swap.activation is Activation.INTERRUPT:
            for one in reversed(self._rows.clear()):
                self._line.add(one, first=True)
        self.gate.finish()
        for one in self._line.swapped():
            self.out.append(version_gone(one.request, self.gate.version))

    # joining --------------------------------------------------------------------------------

    def _admit(self) -> None:
        joining = self._choose()
        if not joining:
            return
        for part in self._portions(joining):
            self._join(part)
            # Not before: what fails meanwhile must still be found, to be refused.
            for one in part:
                self._line.pop(one.request_id)

    def _choose(self) -> list[Running]:
        """Those for whom there is a row and cache; at least one if nothing runs."""
        free = self._max_concurrent - len(self._rows)
        longest = max((one.limit for one in self._rows.owners), default=0)
        rows, prompts, chosen = len(self._rows), 0, list[Running]()
        if free <= 0:
            return chosen
        for one in islice(self._line.startable(), free):
            longest = max(longest, one.limit)
            prompts += len(one.request.tokens) + len(one.emitted)
            full = (rows + 1) * longest > self._cache_tokens
            if (rows and full) or (chosen and prompts > self._prefill_tokens):
                break
            chosen.append(one)
            rows += 1
        return chosen

    def _portions(self, joining: list[Running]) -> list[list[Running]]:
        """Cut so that padding stays small: one portion has contexts of similar length."""
        joining.sort(key=lambda one: len(one.request.tokens) + len(one.emitted))
        portions: list[list[Running]] = []
        for one in joining:
            size = len(one.request.tokens) + len(one.emitted)
            first = portions[-1][0] if portions else None
            if first is None or size > 32 + 1.25 * len(first.context):
                portions.append([])
            portions[-1].append(one)
        return portions

    def _join(self, joining: list[Running]) -> None:
        """Prefill, each distinct context once, and sample the first tokens."""
        prompts: dict[tuple[int, ...], int] = {}
        sources = [prompts.setdefault(one.context, len(prompts)) for one in joining]
        caught, logits = self._policy.prefill(list(prompts))
        first, lengths = len(self._rows), [len(one.context) for one in joining]
        self._cache.reserve(self._num_rows(first + len(joining)), self._columns(max(lengths) + 1))
        picked = torch.tensor(sources, device=self._policy.device)
        self._cache.insert(caught, picked, first)
        self._rows.add(joining, lengths)
        self.prompt_tokens += sum(map(len, prompts))
        self._advance(first, logits.index_select(0, picked))

    def _num_rows(self, needed: int) -> int:
        return min(max(1 << (needed - 1).bit_length(), 8), self._max_concurrent)

    def _columns(self, needed: int) -> int:
        if needed <= self._cache.columns:
            return self._cache.columns
        doubled = max(needed, 2 * self._cache.columns, 32)
        return min(-(-doubled // 16) * 16, -(-self.limits.max_context // 16) * 16)

    # stepping -------------------------------------------------------------------------------

    def _advance(self, first: int, logits: Tensor) -> None:
        rows = self._rows
        stopped, failed = rows.advance(first, logits)
        part = slice(first, len(rows))
        self.tokens_generated += len(rows) - first
        ended = stopped | failed | (rows.length[part] >= rows.limit[part])
        matched = self._match_strings(first) if rows.with_strings else {}
        if matched or bool(ended.any()):
            self._end_some(first, ended=ended, stopped=stopped, failed=failed, matched=matched)
        self._since_flush += 1
        if self._since_flush >= BUFFER:
            self.flush()

    def _end_some(
        self,
        first: int,
        *,
        ended: Tensor,
        stopped: Tensor,
        failed: Tensor,
        matched: dict[int, str],
    ) -> None:
        chosen = ended.nonzero().squeeze(1)
        places: list[int] = chosen.tolist()
        stops: list[bool] = stopped[chosen].tolist()
        fails: list[bool] = failed[chosen].tolist()
        last: list[int] = self._rows.token[first:][chosen].tolist()
        reasons = {row: ("stop", text) for row, text in matched.items()}
        for place, stop, fail, token in zip(places, stops, fails, last, strict=True):
            row = first + place
            if fail:
                reasons[row] = ("error", "")
            elif stop:
                reasons[row] = ("stop", str(token))
            else:
                reasons.setdefault(row, ("length", ""))
        rows = sorted(reasons)
        self._end(rows, [reasons[row][0] for row in rows], [reasons[row][1] for row in rows])

    def _match_strings(self, first: int) -> dict[int, str]:
        """Rows whose newest token completes one of their stop strings."""
        decode, found = self._decode_text, dict[int, str]()
        tokens: list[int] = self._rows.token[: len(self._rows)].tolist()
        for row in range(first, len(self._rows)):
            one = self._rows.owners[row]
            strings = one.request.sampling.stop_strings
            if not strings or decode is None:
                continue
            # A stop of n bytes ends within the newest n tokens, whatever the vocabulary.
            keep = max(len(text.encode()) for text in strings) + 4
            one.recent = [*one.recent[-keep:], tokens[row]]
            text = decode(one.recent)
            hit = next((stop for stop in strings if stop in text), "")
            if hit:
                found[row] = hit
        return found

    def _end(self, rows: list[int], reasons: list[str], matched: list[str]) -> None:
        if not rows:
            return
        tokens, logprobs = self._rows.read(rows)
        version = self.gate.version
        for place, row in enumerate(rows):
            name, reason = self._rows.owners[row].request_id, reasons[place]
            if reason == "error":
                text = f"log-probs of version {version} are not finite"
                self.out.append(refusal(name, "INTERNAL", text))
                continue
            some, their = tokens[place], logprobs[place]
            self.out.append(
                emit(name, some, their, version=version, reason=reason, matched=matched[place])
            )
        moved = self._rows.remove(rows)
        if moved is not None:
            self._cache.move(*moved, width=self._cache.columns)
