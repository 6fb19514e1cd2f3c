"""The documentation site is built without warnings, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning, such as a broken link or anchor, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 60
    for page in pages:
        text = page.read_text()
        assert not FOREIGN.findall(text), page
        assert "default-src 'self'" in text, page
    fonts = [path for path in site.rglob("*.css") if "fonts.g" in path.read_text()]
    assert not fonts


def test_links_to_the_repository_lead_to_pages_with_its_files(site: Path) -> None:
    page = (site / "plugins" / "reward" / "index.html").read_text()
    target = "repository/examples/plugins/src/paceline_example/reward.py/"
    assert target in page
    shown = (site / target / "index.html").read_text()
    assert "takewhile" in shown
    readme = (site / "repository" / "ARCHITECTURE" / "index.html").read_text()
    assert 'id="who-owns-which-state"' in readme


def test_pictures_are_there(site: Path) -> None:
    page = (site / "concepts" / "index.html").read_text()
    sources = re.findall(r'<img[^>]*src="([^"]+)"', page)
    assert len(sources) >= 3
    assert all((site / "concepts" / source).resolve().is_file() for source in sources)
