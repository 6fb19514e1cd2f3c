"""RaC: recover and correct (arXiv 2509.07953).

A failed episode is taken back to its last good state and played on from there, again and again
until one succeeds; its world has to be replayable. So the end of a long task is practised from
states that the policy reaches itself, long before it succeeds from the start.

In the paper people, who see where a robot went wrong, recover and correct, and their corrections
are imitated. Here the environment tells where (`paceline.methods.parts.continuation`), and the
policy corrects itself: corrections by a teacher need an engine of another model, which jobs do not
have. Each episode trains its own turns only.
"""

from paceline.plugins import Method, Plugin

METHOD = Method(
    stage="generate",
    evidence="notes",
    claim="about a tenth of the data, with corrections by people",
    parts={"allocators": {"rac": Plugin(".allocator:Rac")}},
)
