"""Runs a server as its child, and kills it when the process that started the guard ends.

It is started by path and uses only the standard library. Its standard input is a pipe whose other
end only the parent has: however the parent ends, the pipe closes and the process group is killed.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command in the arguments; returns its exit code."""
    if os.getpgid(0) != os.getpid():
        print("guard: must lead its own process group", file=sys.stderr)
        return 2
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, daemon=True).start()
    code = child.wait()
    print(f"guard: the server ended with {code}", file=sys.stderr, flush=True)
    # Children of the server must not survive it and keep ports or memory.
    os.killpg(0, signal.SIGKILL)
    return code


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
