"""Built-in allocators, which decide how many episodes a task gets.

An allocator is a class in a module of its own, described by its parameters.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins({"allocators": {"redundancy": Plugin(".redundancy:Redundancy")}})
