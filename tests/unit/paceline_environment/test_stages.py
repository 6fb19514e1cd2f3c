import pytest

from paceline_environment.episodes.stages import STAGES, Stages


@pytest.mark.parametrize("stage", STAGES)
def test_only_environment_steps_are_work_of_this_process(stage: str) -> None:
    stages = Stages()
    before = stages.progress()
    with stages.wait(stage):
        assert stages.progress().pending == (stage == "step")
        assert stages.status()["waiting"][stage] == 1
    after = stages.progress()
    assert after.pending == 0
    assert (after.done != before.done) is (stage == "step")
