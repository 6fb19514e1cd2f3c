"""DART: decoupled agentic RL training for GUI agents (arXiv 2509.23866).

Single episodes are scheduled instead of batches of them: tasks that were never tried and then the
weakest come first, and those that mostly succeed get fewer episodes. A group without a success
gets a stored one of its task. Groups are trimmed with both kinds of outcome in them; `dart_trim`
trims by weights, which leaves the baseline to the whole group. What the paper has and the release
has not are options: `slack` of `dart_rollouts`, so that no episode is much longer than a success
before, and the correction `dart_steps`, with which only turns of high entropy train.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="generate",
    evidence="code",
    claim="42.1 % on OSWorld-Verified, +14.6 over the base model, with its pool of successes",
)
