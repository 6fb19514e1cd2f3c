"""Built-in filters, which decide whether a finished group is trained on, and which of its episodes.

A filter is a function in a module of its own, described by its parameters.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins(
    {
        "filters": {
            "balanced": Plugin(".balanced:balanced"),
            "mean_reward": Plugin(".mean_reward:mean_reward"),
            "zero_variance": Plugin(".zero_variance:zero_variance"),
        },
    }
)
