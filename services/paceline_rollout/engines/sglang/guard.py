"""Runs a server as its child and takes it down with whoever started the guard.

Started by path with nothing but the standard library. Its standard input is a pipe that only the
starter holds open: however the starter ends, the pipe closes and the whole group is killed.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command of the arguments; its exit code."""
    if os.getpgid(0) != os.getpid():
        print("guard: wants a process group of its own", file=sys.stderr)
        return 2
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, daemon=True).start()
    code = child.wait()
    print(f"guard: the server ended with {code}", file=sys.stderr, flush=True)
    # What the server has started must not survive it and keep its ports or memory.
    os.killpg(0, signal.SIGKILL)
    return code


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
