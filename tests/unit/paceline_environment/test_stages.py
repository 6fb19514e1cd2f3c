import pytest

from paceline_environment.stages import STAGES, Stages


@pytest.mark.parametrize("stage", STAGES)
def test_only_steps_of_worlds_are_work_of_this_process(stage: str) -> None:
    stages = Stages()
    before = stages.pulse()
    with stages.wait(stage):
        assert stages.pulse().pending == (stage == "step")
        assert stages.facts()["waiting"][stage] == 1
    after = stages.pulse()
    assert after.pending == 0
    assert (after.done != before.done) is (stage == "step")
