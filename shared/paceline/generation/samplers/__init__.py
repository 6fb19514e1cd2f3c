"""Built-in samplers, which decide the order of tasks.

A sampler is a class in a module of its own, described by its parameters.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins(
    {
        "samplers": {
            "shuffle": Plugin(".shuffle:Shuffle"),
            "staged": Plugin(".staged:Staged"),
        },
    }
)
