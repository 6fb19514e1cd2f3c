"""What holds a process that reads hostile input with code of ours, applied by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UnavailableError
from paceline.isolation.sandbox import landlock, seal, seccomp
from paceline.isolation.sandbox.places import read_by_python

_OPEN_FILES = 256


@dataclass(frozen=True, slots=True)
class Hold:
    """Limits of one process; when its parent ends, it does."""

    parent: int  # 0: whichever it is by now
    file_bytes: int
    cpu_s: int
    memory_bytes: int = 4 << 30  # of addresses
    what: str = "what handles packages of jobs"

    def apply(
        self, *, readable: Sequence[Path], changed: Path | None = None, has_network: bool = False
    ) -> None:
        """Leave this process what Python needs, some more to read, and a folder to write in.

        Without a network it is sealed as programs are: it starts no process either. All that it
        imports of Paceline has to be imported before.

        Raises:
            UnavailableError: this machine cannot hold it.
        """
        seal.die_with_parent(self.parent)
        seal.first_to_die()
        if landlock.abi() == 0:
            raise UnavailableError(
                f"this machine cannot contain {self.what}: its kernel has no Landlock (Linux 5.13, "
                "`lsm=landlock,...`); see `paceline doctor`"
            )
        try:
            calls = b"" if has_network else _calls(files=changed is not None)
            rules = landlock.ruleset(
                readable=[*read_by_python(), Path(sys.prefix, "pyvenv.cfg"), *readable],
                writable=[Path("/dev/null")],
                has_network=has_network,
            )
            if changed is not None:
                landlock.allow_changes(rules, changed)
            seal.drop_capabilities()
            seal.apply(seal.Seals(rules, calls), self._limits(), own_user=False)
        except (OSError, ImportError) as error:  # libseccomp or pyseccomp is missing
            raise UnavailableError(
                f"this machine cannot contain {self.what}: {error}; see `paceline doctor`"
            ) from None

    def _limits(self) -> dict[str, int]:
        return {
            "memory_bytes": self.memory_bytes,
            "output_bytes": self.file_bytes,
            "scratch_bytes": 0,
            "open_files": _OPEN_FILES,
            "cpu_s": self.cpu_s,
        }


def _calls(*, files: bool) -> bytes:
    scoped = landlock.abi() >= landlock.SCOPES_ABI
    return seccomp.compiled(signals_are_scoped=scoped, files=files)
