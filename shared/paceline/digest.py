"""Former name of `paceline.platform.digest`, until the next release but one."""

from warnings import warn

from paceline.platform.digest import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

warn("paceline.digest is paceline.platform.digest now", DeprecationWarning, stacklevel=2)
