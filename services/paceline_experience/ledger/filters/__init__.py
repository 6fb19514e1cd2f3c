"""The filters of a job: what they are given, and the checks of what they answer."""
