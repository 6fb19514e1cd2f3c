"""Former name of `paceline.front.client.curves`, until the next release but one."""

from warnings import warn

from paceline.front.client.curves import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

warn("paceline.client.curves is paceline.front.client.curves now", DeprecationWarning, stacklevel=2)
