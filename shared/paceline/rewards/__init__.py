"""Built-in rewards.

A reward is a function in a module of its own, described by its parameters.
"""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins(
    {
        "rewards": {
            "template_answer": Plugin(".template:template_answer"),
            "template_format": Plugin(".template:template_format"),
            "exact": Plugin(".exact:exact"),
            "regex": Plugin(".regex:regex"),
            "environment": Plugin(".environment:environment"),
            "python": Plugin(".python:python"),
            "overlong": Plugin(".overlong:overlong"),
            "code": Plugin(".code:code"),
            "format": Plugin(".format:format"),
            "json_schema": Plugin(".json_schema:json_schema"),
            "judge": Plugin(".judge:judge"),
            "length": Plugin(".length:length"),
            "math": Plugin(".math:math"),
            "numeric": Plugin(".numeric:numeric"),
        },
    }
)
