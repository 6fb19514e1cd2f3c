"""`paceline doctor`: what a machine, an installation and a cluster can do, and what is missing."""

from paceline.front.cli.doctor.command import doctor

__all__ = ["doctor"]
