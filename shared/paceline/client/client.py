"""Former name of `paceline.front.client.client`, until the next release but one."""

from warnings import warn

from paceline.front.client.client import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

warn("paceline.client.client is paceline.front.client.client now", DeprecationWarning, stacklevel=2)
