import pytest

from paceline.enums import (
    EPISODE_TRANSITIONS,
    JOB_TRANSITIONS,
    EpisodeState,
    JobState,
    check_episode_transition,
    check_job_transition,
)
from paceline.errors import TransitionError


def test_every_state_has_a_row() -> None:
    assert set(EPISODE_TRANSITIONS) == set(EpisodeState)
    assert set(JOB_TRANSITIONS) == set(JobState)


def test_every_unfinished_job_can_fail_or_be_cancelled() -> None:
    for state in JobState:
        if not state.terminal:
            assert JobState.FAILED in JOB_TRANSITIONS[state]


def test_illegal_transitions_name_both_states() -> None:
    with pytest.raises(TransitionError, match="queued -> trained"):
        check_episode_transition(EpisodeState.QUEUED, EpisodeState.TRAINED)
    with pytest.raises(TransitionError, match="succeeded -> running"):
        check_job_transition(JobState.SUCCEEDED, JobState.RUNNING)
    check_job_transition(JobState.RUNNING, JobState.SUCCEEDED)
