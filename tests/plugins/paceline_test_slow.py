"""A sampler whose module waits for others when it is imported, and then fails."""

from paceline.errors import InvalidError
from paceline_harness.gates import OTHERS_RAN
from paceline_harness.patience import PATIENCE_S

raise InvalidError(f"others ran: {OTHERS_RAN.wait(PATIENCE_S)}")
