import pytest

from paceline.types import WorkerPhase
from paceline_environment.stages import STAGES, Stages


@pytest.mark.parametrize("stage", STAGES)
def test_only_environment_steps_are_work_of_this_process(stage: str) -> None:
    stages = Stages()
    before = stages.progress()
    with stages.of("job").wait(stage):
        assert stages.progress().pending == (stage == "step")
        assert stages.status()["waiting"][stage] == 1
    after = stages.progress()
    assert after.pending == 0
    assert stages.waiting[stage] == 0
    assert (after.done != before.done) is (stage == "step")


def test_each_job_is_told_of_its_own_episodes() -> None:
    stages = Stages()
    with stages.of("one").wait("score"):
        pass
    with stages.of("one").wait("score"), stages.of("two").wait("score"):
        assert stages.waiting["score"] == 2
        assert stages.phases() == (
            WorkerPhase("score", done=1, total=2, job_id="one"),
            WorkerPhase("score", done=0, total=1, job_id="two"),
        )
        stages.end("two")
        assert len(stages.phases()) == 2  # it has an open episode
    for name in ("one", "two"):
        stages.end(name)
    assert (stages.phases(), stages.jobs) == ((), {})
