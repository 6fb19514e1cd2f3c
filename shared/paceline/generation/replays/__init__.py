"""Built-in replays, which store episodes and add them to later groups of their task.

A replay is a class in a module of its own, described by its parameters.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins({"replays": {"experience_replay": Plugin(".experience_replay:ExperienceReplay")}})
