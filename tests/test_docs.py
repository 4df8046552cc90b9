# SPDX-License-Identifier: Apache-2.0
"""Every block of code in the documentation does what it says, and `make docs` builds a complete site."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib

import documentation
import pytest
from documentation import PAGES, ROOT, blocks, is_like, ranks, run_commands, run_python

import commrt
from commrt.testing.processes import run_processes

FIRST = {"README.md", "docs/index.md", "docs/concepts.md"}
"""Pages that newcomers read, which run in `make test`. `make docs` runs all; `make test-slow`, all but studies."""


def executed(page):
    """The page as a parameter of a test."""
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=[] if name in FIRST else [pytest.mark.slow])


def run(page, folder):
    """What each executed block printed, by its line."""
    printed = dict(run_commands(page, folder))
    if any(block.language == "python" and block.is_executed for block in blocks(page)):
        outcomes = run_processes(
            ranks(page), run_python, str(page), str(folder), limit_s=documentation.LIMIT_S, holds_store=True
        )
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert [outcome.exit_code for outcome in outcomes] == [0] * len(outcomes)
        printed |= outcomes[0].value
    for block in blocks(page):
        if block.language == "toml" and block.is_executed:
            printed[block.line] = str(tomllib.loads(block.body))
    return printed


@pytest.mark.docs
@pytest.mark.parametrize("page", [executed(page) for page in PAGES if any(each.is_executed for each in blocks(page))])
def test_every_block_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed, before = run(page, tmp_path), None
    for block in blocks(page):
        if block.language != "text":
            assert (block.line in printed) is block.is_executed, f"{block.place} was not executed"
            before = block
        elif block.is_executed:
            assert is_like(block.body, printed[before.line]), (
                f"{block.place} is not what was printed:\n{printed[before.line]}"
            )


def test_every_block_of_python_is_python():
    """Also those that are not run."""
    for block in (block for page in PAGES for block in blocks(page) if block.language == "python"):
        ast.parse(block.body, f"{block.page}")


def test_a_command_that_names_what_does_not_exist_is_refused():
    complaints = {
        "make nonsense": "no target",
        "pip install '.[nonsense]'": "no extra",
        "sudo python bench/nonsense.py": "no file",
        "torchrun nonsense.py": "no file",
        "torchrun --no-python commrt verify ring --nonsense": "[Nn]o such option",
        "torchrun examples/mnist/train.py --nonsense": "[Nn]o such option",
        "commrt verify nonsense": "no algorithm",
        "ls && make test": "no command",
    }
    for command, complaint in complaints.items():
        with pytest.raises(Exception, match=complaint):
            [documentation.run_command(words) for words in documentation.commands(command)]


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


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_every_page_and_at_most_45_in_its_navigation(site):
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    elsewhere = {f"{name}.html" for name in ("contributing", "changelog", "kernels", "findings", "bench", "studies")}
    elsewhere |= {"api/command.html"} | {f"studies/{page.parent.name}.html" for page in ROOT.glob("studies/*/*.md")}
    assert pages | elsewhere <= {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].count(".md\n") <= 45
    for page in site.rglob("*.html"):  # those that have moved
        for file, anchor in re.findall(r'http-equiv="refresh" content="0; url=([^"#]+)#?(.*?)"', page.read_text()):
            assert f'id="{anchor}"' in (page.parent / file).read_text() or not anchor
    assert not (site / "site").exists()


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site):
    asked = {page.name: LOADED.findall(page.read_text()) for page in site.rglob("*.html")}
    assert {name: found for name, found in asked.items() if any("canonical" not in tag for tag in found)} == {}
    styles = {style.name: IMPORTED.findall(style.read_text()) for style in site.rglob("*.css")}
    assert {name: found for name, found in styles.items() if found} == {}


@pytest.mark.slow
def test_the_reference_of_the_site_knows_every_public_name(site):
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert [name for name in commrt.__all__ if f'id="commrt.{name}"' not in text] == []


@pytest.mark.slow
def test_the_search_of_the_site_finds_what_pages_say(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any(entry["title"] == "QuorumLost" and "troubleshooting" in entry["location"] for entry in index["docs"])
