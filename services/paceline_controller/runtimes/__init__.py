"""Where processes run: on this machine, or as pods."""
