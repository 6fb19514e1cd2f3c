"""GDPO: group reward-decoupled normalization policy optimization (arXiv 2601.05242).

Summing the parts of a reward before normalising gives different combinations the same advantage.
Here each part is normalised over its group, then the weighted sum over the batch.
"""
