"""Writes nonsense to every pipe of the process that imports it."""

import contextlib
import os

for _number in range(3, 20):
    with contextlib.suppress(OSError):
        os.write(_number, b"\0\0\0\2no")
