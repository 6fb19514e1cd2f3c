from paceline.enums import Phase
from paceline.platform.server.phase_report import LATELY, PhaseReport


def test_a_phase_tells_how_long_such_ones_have_lasted_lately() -> None:
    now_s = 0.0
    report = PhaseReport(Phase.LOADING_MODEL, clock=lambda: now_s)
    assert report.now.longest_s == 0.0
    longest = []
    for lasts_s in [50.0, *[float(each) for each in range(1, LATELY + 1)]]:
        report.enter(Phase.STEPPING)
        report.add()
        longest.append(report.now.longest_s)
        now_s += lasts_s
        report.enter(Phase.COMMITTING)
    report.enter(Phase.STEPPING)
    assert longest == [0.0, *[50.0] * LATELY]
    assert report.now.longest_s == float(LATELY)
