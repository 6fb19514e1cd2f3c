"""MinPRO: A Step Back, prefix importance ratios (arXiv 2601.22718).

The correct off-policy weight of a token is the product of the ratios of its prefix, which explodes;
the usual ratio ignores the prefix. MinPRO multiplies a token's ratio by the smallest ratio before
it. The paper's clip bounds are not known to us; the defaults follow CISPO with 0.28.
Use it with `proximal: {kind: behaviour}`.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="notes",
    claim="above GRPO, GSPO, CISPO and M2PO with two or more steps of delay (8B, 14B)",
)
