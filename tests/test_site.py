# SPDX-License-Identifier: Apache-2.0
"""The site that `make docs` builds: complete, and content with itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import commrt

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
IMPORTED = re.compile(r"@import|url\([\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_builds_without_a_warning_and_has_every_page(site):
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    elsewhere = {"contributing.html", "changelog.html", "kernels.html", "findings.html", "api/command.html"}
    assert pages | elsewhere <= {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert not (site / "site").exists()


def test_it_asks_no_other_host_for_anything(site):
    asked = {page.name: LOADED.findall(page.read_text()) for page in site.rglob("*.html")}
    assert {name: found for name, found in asked.items() if any("canonical" not in tag for tag in found)} == {}
    styles = {style.name: IMPORTED.findall(style.read_text()) for style in site.rglob("*.css")}
    assert {name: found for name, found in styles.items() if found} == {}


def test_its_reference_knows_every_public_name(site):
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert [name for name in commrt.__all__ if f'id="commrt.{name}"' not in text] == []


def test_its_search_finds_what_pages_say(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any(entry["title"] == "QuorumLost" and "troubleshooting" in entry["location"] for entry in index["docs"])
