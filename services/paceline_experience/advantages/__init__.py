"""Advantage estimators, in numpy, over a whole batch."""
