"""Rows of data files as tasks: read, checked and indexed once, then looked up by their number.

JSON lines, Parquet, and folders of Hugging Face `datasets` are sources of rows; `RowShape` says how
a row becomes the payload of a task. A factory of tasks with a parameter of type `JobData` is given
that of its job, and asks it for rows.

Decisions: docs/decisions/data.md.
"""

from paceline.data.errors import MissingDataError, RowError, UnreadError
from paceline.data.job_data import JobData, takes_data
from paceline.data.shape import RowShape

__all__ = ["JobData", "MissingDataError", "RowError", "RowShape", "UnreadError", "takes_data"]
