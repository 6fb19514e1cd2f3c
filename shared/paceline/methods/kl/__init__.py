"""KL to a reference policy as a part of the loss.

Estimators k1, k2 and k3 are those of Schulman's note (2020). Differentiated, k1 has no gradient in
expectation, k2 has the gradient of the KL, k3 that of the KL in the other direction; `k3_k2` has
the value of k3 and the gradient of k2, and is the one to use. The reference policy is the job's
initial model.
"""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="code")
