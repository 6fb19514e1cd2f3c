"""Built-in topologies, which drive an episode: the order of turns and the resulting transcripts.

A topology is a coroutine function in a module of its own, described by its parameters.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins({"topologies": {"linear": Plugin(".linear:linear")}})
