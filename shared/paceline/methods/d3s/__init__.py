"""D3S: dynamic dual-level down-sampling (arXiv 2509.22115).

Most samples and tokens carry little signal. Level 1 trains the episodes whose advantages have the
largest variance, level 2 the tokens with the largest product of advantage and entropy. Shares grow
over training; their start and end are not stated in the paper.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="notes",
    claim="34.3 and 56.8 against 29.8 and 53.1 of GRPO (7B), 2.0 times faster",
)
