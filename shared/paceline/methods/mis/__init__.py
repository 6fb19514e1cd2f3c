"""Masked importance sampling: rejects tokens or sequences by how far engine and trainer disagree.

verl's rejection sampling (`rollout_corr_helper.py`) and slime's examples of train/inference
mismatch. The answer is a mask; together with `tis` the tokens that are kept are weighted as well.
Bounds as narrow as those of the geometric mean in the sources are for engine mismatch at equal
weights; stale samples are nearly all rejected by them.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="training with the log-probs of another engine stays stable",
)
