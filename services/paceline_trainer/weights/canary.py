"""Makes the canaries of a job: text that the policy itself has sampled, and its log-probs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidError
from paceline.platform.telemetry.logs import Log
from paceline.weights.canary import Canary, CanarySequence, trimmed_rms
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.model import DTYPES, PolicyModel
from paceline_trainer.weights.layerwise import LayerwisePolicy, Weights

MIN_SEQUENCES, MAX_SEQUENCES = 4, 32
NUM_TOKENS = 512  # of all sequences
MAX_LENGTH = NUM_TOKENS // MIN_SEQUENCES
HOST_ROOM = 2 << 30  # bytes that a rank without a GPU takes for granted
MAX_NOISE = 0.2
"""Nats. Pretrained models have 0.04 in bfloat16; above this the trainer itself is broken."""

log = Log("canary")


class CanaryMaker:
    """Tokens are fixed at the first canary. Collective, except for a policy that is whole.

    `text` [S, L] has them, -1 before that; a checkpoint may fill it in place.
    """

    def __init__(
        self,
        policy: PolicyModel,
        group: RankGroup,
        *,
        engine_dtype: str,
        own: bool,
        max_context: int = MAX_LENGTH,
        seed: int = 0,
    ) -> None:
        """`own`: the policy itself computes in the precision of engines, in the calling thread.

        If not, a copy of its modules measures the noise of that precision.
        """
        self._policy = policy
        self._group = group
        self._layerwise = LayerwisePolicy(policy, group.device)
        self._recipe = engine_dtype
        self._stored = DTYPES[engine_dtype]
        self._own = own
        length = max(min(max_context, MAX_LENGTH), 2)
        rows = min(max(NUM_TOKENS // length, MIN_SEQUENCES), MAX_SEQUENCES)
        self._seed = seed
        self.text = torch.full((rows, length), -1)

    def capture(self) -> Weights:
        """What `make` needs of the policy, without a copy."""
        return self._layerwise.capture()

    @torch.no_grad()
    def make(self, weights: Weights) -> Canary:
        """The canary of these weights.

        Raises:
            InvalidError: the trainer does not agree with itself.
        """
        if bool((self.text < 0).any()):
            self.text.copy_(self._sample(weights))
        ids = self.text.clone()
        reference = self._layerwise.logprobs(
            weights, ids, stored=self._stored, dtype=torch.float32
        ).cpu()
        differences = (self._in_engine_precision(weights, ids, reference) - reference).double()
        # Ranks compute the same, but for rounding; all have to come to one conclusion.
        noise = float(self._group.gather([trimmed_rms(differences.flatten().tolist())])[0, 0])
        self._check(noise)
        sequences = zip(ids.tolist(), reference.tolist(), strict=True)
        return Canary(
            tuple(CanarySequence(tuple(tokens), tuple(values)) for tokens, values in sequences),
            noise,
            self._recipe,
        )

    def _in_engine_precision(self, weights: Weights, ids: Tensor, reference: Tensor) -> Tensor:
        if self._own:
            given = ids.to(self._group.device)
            targets = given[:, 1:].reshape(-1)
            indices = torch.arange(len(targets), device=given.device)
            found = self._policy(given[:, :-1], None, indices, targets, 1.0).logprobs
            return found.view(len(ids), -1).cpu()
        if self._stored == torch.float32:
            return reference  # by the same computation
        return self._layerwise.logprobs(weights, ids, stored=self._stored, dtype=self._stored).cpu()

    def _sample(self, weights: Weights) -> Tensor:
        """Text at temperature 1 from the policy as it is, [S, L]; the same on all ranks."""
        generator = torch.Generator().manual_seed(self._seed)
        rows, length = self.text.shape

        def choose(logits: Tensor) -> Tensor:
            if bool(logits.isnan().any()):
                self._check(math.nan)
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            return torch.from_numpy(self._group.gather(drawn.tolist())[0]).long()

        first = torch.full((rows, 1), _first_token(self._policy.config.get_text_config()))
        num_bytes = self._layerwise.whole_bytes(weights, self._stored)
        if num_bytes and self._fits(num_bytes):
            log.info("gathering all weights once, for the canary's text", bytes=num_bytes)
            weights = self._layerwise.whole(weights, self._stored)
        return self._layerwise.extend(weights, first, length, choose)

    def _fits(self, num_bytes: int) -> bool:
        """Whether all ranks have room for so much, and as much again for what else there is."""
        device, free = self._group.device, HOST_ROOM
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
        return bool(self._group.gather([2 * num_bytes <= free]).all())

    def _check(self, noise: float) -> None:
        if not noise <= MAX_NOISE:
            raise InvalidError(
                f"canary: the trainer's own log-probs in {self._recipe} differ by {noise:.3g} "
                f"nats from those in float32; allowed: {MAX_NOISE}. The trainer itself is broken, "
                "no engine: its weights are not finite, or its model does not bear this precision; "
                "use `model.dtype: float32`, or a checkpoint of an earlier step"
            )


def _first_token(config: Any) -> int:
    """The token that begins a text, else one that ends it, else 0."""
    for value in (config.bos_token_id, config.eos_token_id):
        token = value[0] if isinstance(value, list) and value else value
        if isinstance(token, int) and 0 <= token < config.vocab_size:
            return token
    return 0
