"""Runs the Python blocks of pages in order, in one namespace a page, and then their test functions.

    python -m paceline_harness.documents.run_python PAGE.md ...

Blocks that are not run are compiled. Each page has a process and a folder of its own, forked from
one with the imports that many pages need, which take longer than what the pages do.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline_harness.documents.snippets import snippets

IMPORTED = ("paceline.plugins", "paceline.testing", "paceline.methods.parts.surrogates")


def main(pages: Sequence[Path]) -> int:
    """Run all pages; those that raise say what, and 1 is returned."""
    if len(pages) > 1:
        for name in IMPORTED:
            importlib.import_module(name)
    gc.freeze()  # no child looks at what all have
    sound = [is_sound(page.absolute()) for page in pages]
    return int(not all(sound))


def is_sound(page: Path) -> bool:
    """Whether a page runs, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("fork").Process(target=run, args=(page, folder))
        child.start()
        child.join()
    return child.exitcode == 0


def run(page: Path, folder: str) -> None:
    """Run the blocks of a page in a folder; raises what they raise."""
    os.chdir(folder)
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
            with tempfile.TemporaryDirectory() as own:
                wants_folder = "tmp_path" in inspect.signature(function).parameters
                function(**({"tmp_path": Path(own)} if wants_folder else {}))


if __name__ == "__main__":
    sys.exit(main([Path(each) for each in sys.argv[1:]]))
