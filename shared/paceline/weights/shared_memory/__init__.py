"""Weights in memory that the processes of one machine share: no byte of them is copied."""
