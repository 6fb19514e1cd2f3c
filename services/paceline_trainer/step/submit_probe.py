"""Whether the trainer can compute the model of a `config.json`; see `model_probe`."""

from __future__ import annotations

import torch

from paceline.models.model_probe import answer
from paceline_trainer.step.loading import check_family, read_config

if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(read_config, check_family)
