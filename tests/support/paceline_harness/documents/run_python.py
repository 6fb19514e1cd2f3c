"""Runs the Python blocks of a page in order, in one namespace, and then their test functions.

    python -m paceline_harness.documents.run_python PAGE.md

Blocks that are not run are compiled.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from paceline_harness.documents.snippets import snippets


def main(page: Path) -> int:
    """Run the blocks; raises what they raise."""
    module = ModuleType("page")
    module.__file__ = str(page)
    sys.modules["page"] = module  # where pydantic looks annotations up
    for each in snippets(page):
        if each.language != "python":
            continue
        # An empty head keeps the line numbers of the page.
        code = compile("\n" * (each.line - 1) + each.body, str(page), "exec", dont_inherit=True)
        if not each.not_run:
            exec(code, vars(module))
    for name, function in sorted(vars(module).items()):
        if name.startswith("test_"):
            with tempfile.TemporaryDirectory() as folder:
                wants_folder = "tmp_path" in inspect.signature(function).parameters
                function(**({"tmp_path": Path(folder)} if wants_folder else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
