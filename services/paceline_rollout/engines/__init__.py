"""Inference engines behind one interface, `paceline.plugins.Engine`.

Decisions: docs/decisions/engines.md.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins(
    {
        "engines": {
            "torch": Plugin(".torch.engine:TorchEngine", ".options:TorchOptions"),
            "simulated": Plugin(".simulated:SimulatedEngine", ".options:SimulatedOptions"),
            "sglang": Plugin(".sglang.make:sglang", ".sglang.options:SglangOptions"),
        },
    }
)
