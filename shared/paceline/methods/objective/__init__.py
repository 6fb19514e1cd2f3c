"""The objective of a job: slots, found by name and called in a fixed order."""
