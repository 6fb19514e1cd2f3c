"""Former name of `paceline.front.client`, until the next release but one."""

from warnings import warn

from paceline.front.client import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

warn("paceline.client is paceline.front.client now", DeprecationWarning, stacklevel=2)
