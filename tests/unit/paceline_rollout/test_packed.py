from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline_rollout.engines.torch.packed import Packed


@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_follow_the_weights(bias: bool):
    torch.manual_seed(0)
    large = nn.Linear(24, 40, bias=bias)
    model = nn.Sequential(large, nn.Embedding(4, 8), nn.Linear(40, 3))
    packed = Packed(model, min_elements=500)
    assert len(packed) == 1
    for _ in range(2):
        with torch.inference_mode():
            for value in large.parameters():
                value.normal_()
            for module, forward in packed.pack(lambda weight: weight):
                module.forward = forward
            for shape in ((24,), (5, 24), (3, 1, 24)):
                x = torch.randn(shape)
                wanted = nn.functional.linear(x, large.weight, large.bias)
                torch.testing.assert_close(large(x), wanted, atol=1e-5, rtol=1e-5)
