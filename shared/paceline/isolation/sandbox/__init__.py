"""Runs Python programs that nobody trusts, each in a sealed process of its own.

`zygote.py` is a warm process without secrets that forks one child per program; `seal.py` is what
the child does to itself before it reads the program; `sandbox.py` is the side of the service.
Needs Linux with Landlock (5.13) and libseccomp; no privilege. That is level 2. Where users may make
namespaces, programs have a root folder of their own too, and may have one to write in and further
processes (`namespaces.py`): level 3.

Decisions: docs/decisions/isolation.md.
"""
