"""Former name of `paceline.platform.server`, for the program `issue_keys`."""
