"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071, section 4).

Token ratios are noisy single-sample weights, which explode in mixture-of-experts models. GSPO clips
the geometric mean of a sequence's ratios, the same for all of its tokens; its bounds are therefore
hundreds of times narrower. Aggregate with `seq_mean_token_mean`.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="stable training of mixture-of-experts models without routing replay",
)
