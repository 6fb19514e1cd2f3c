import pytest

from paceline.errors import TransitionError
from paceline.types import (
    EPISODE_STEPS,
    JOB_STEPS,
    EpisodeState,
    JobState,
    check_episode_step,
    check_job_step,
)


def test_every_state_has_a_row() -> None:
    assert set(EPISODE_STEPS) == set(EpisodeState)
    assert set(JOB_STEPS) == set(JobState)


def test_every_unfinished_job_can_fail_or_be_cancelled() -> None:
    for state in JobState:
        if not state.terminal:
            assert JobState.FAILED in JOB_STEPS[state]


def test_illegal_transitions_name_both_states() -> None:
    with pytest.raises(TransitionError, match="queued -> trained"):
        check_episode_step(EpisodeState.QUEUED, EpisodeState.TRAINED)
    with pytest.raises(TransitionError, match="succeeded -> running"):
        check_job_step(JobState.SUCCEEDED, JobState.RUNNING)
    check_job_step(JobState.RUNNING, JobState.SUCCEEDED)
