# SPDX-License-Identifier: Apache-2.0
"""What pages point to exists: links, anchors, names of ours, files; and what must be documented is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from documentation import PAGES, ROOT, commands, parsed

import commrt
from commrt import errors
from commrt.testing.ranks import local_worlds
from commrt.training.replica import Replica

LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
REFERENCE = re.compile(r"^::: (\S+)", re.MULTILINE)
OURS = re.compile(r"(?<![\w./-])((?:algorithms|bench|commrt|docs|examples|kernels|tests)/[\w./*-]+)")
BUILT = {"docs/launchers.md", "docs/doors.md", "docs/limits.md"}
TROUBLE = ROOT / "docs" / "troubleshooting.md"


def named(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """The page without its blocks of code."""
    return FENCED.sub("", page.read_text())


def spans(page):
    return CODE.findall(prose(page))


def anchors(page):
    """As GitHub and mkdocs make them of headings."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(prose(page)))
    slugs = {re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in plain}
    return slugs | {re.sub(r"-+", "-", slug) for slug in slugs}


def links(page):
    """Relative ones: (target, anchor)."""
    text = CODE.sub("", prose(page))
    found = (link.partition("#") for link in LINK.findall(text) if not re.match(r"https?:|mailto:", link))
    return [(target, anchor) for target, _, anchor in found]


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    for target, anchor in links(page):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{target} is no file"
        if anchor:
            assert anchor in anchors(file), f"{target} has no heading {anchor!r}: {sorted(anchors(file))}"


def exists(name):
    """Whether a dotted name leads to something: a module, then attributes; a dataclass's fields count."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            thing = import_module(module) if find_spec(module) else None
        except ModuleNotFoundError:
            continue
        if thing is None:
            continue
        for part in parts[count:]:
            if part in getattr(thing, "__annotations__", {}):
                return True
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_every_name_of_ours_exists(page):
    for span in spans(page):
        for name in re.findall(r"(?<![\w./-])commrt(?:\.[A-Za-z_]\w*)+(?!/)", span):
            assert exists(name.removesuffix(".py").removesuffix(".toml")), f"{name} in `{span}`"


@pytest.fixture(scope="module")
def things():
    """What pages call `world` and `replica`: names that either has."""
    (world,) = local_worlds(1)
    yield {"world": {*dir(world)}, "replica": {*dir(Replica), "last", "model"}}
    world.close()


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_worlds_and_replicas_have_what_pages_say_they_have(page, things):
    for span in spans(page):
        for thing, name in re.findall(r"\b(world|replica)\.([a-z_]+)", span):
            assert name in things[thing], f"`{span}`"


@pytest.mark.parametrize("page", [page for page in PAGES if "decisions" not in page.parts], ids=named)
def test_every_file_of_ours_that_is_named_exists(page):
    for span in spans(page):
        for name in OURS.findall(span) if "{" not in span else ():
            file = name.rstrip(".,/").partition("::")[0]
            assert [*ROOT.glob(file), *ROOT.glob(f"{file}.py")] or file in BUILT, f"{name} in `{span}`"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_that_are_named_in_a_line_take_these_options(page):
    for span in spans(page):
        if span.startswith("commrt ") and not re.search(r"[A-Z]{2,}|\.\.\.| p\b", span):
            for words in commands(span):
                parsed(words[1:], whole=False)


def listed():
    """What the reference takes from docstrings."""
    return {name for page in (ROOT / "docs/api").glob("*.md") for name in REFERENCE.findall(page.read_text())}


def test_the_reference_has_every_public_name_and_no_other_that_does_not_exist():
    assert [name for name in commrt.__all__ if f"commrt.{name}" not in listed()] == []
    assert [name for name in listed() if not exists(name)] == []


# Errors -------------------------------------------------------------------------------------------------------------

KINDS = [name for name in errors.__all__ if issubclass(getattr(errors, name), errors.CommrtError)]


def section(kind):
    """The text under its heading."""
    return re.search(rf"^### {kind}$(.*?)(?=^##|\Z)", TROUBLE.read_text(), re.MULTILINE | re.DOTALL)


def phrases(text):
    """What is quoted of messages, in italics, as patterns."""
    found = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text)
    return [re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.(?=\W|$):?\s*", phrase)))) for phrase in found]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_its_section(kind):
    assert section(kind), f"docs/troubleshooting.md: add '### {kind}', what it means and what to do"


@cache
def trees():
    """Of every module that makes errors."""
    rooms = (ROOT / room for room in ("commrt", "algorithms"))
    paths = (path for room in rooms for path in sorted(room.rglob("*.py")) if "commrt/kernels" not in str(path))
    return [ast.parse(path.read_text()) for path in paths]


def said(node):
    """A string as it stands in the source, with # where values stand; None of anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "#" for part in node.values)
    if isinstance(node, ast.BinOp):
        return said(node.left)
    return None


def raised(kind):
    """For every place that makes an error of this kind: the messages that it can have, one or some."""
    for tree in trees():
        named_texts = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and said(node.value):
                named_texts[node.targets[0].id].append(said(node.value))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == kind and node.args:
                first = node.args[0]
                yield named_texts[first.id] if isinstance(first, ast.Name) else [said(first) or ""]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"UsageError", "CommrtError"}])
def test_every_message_of_errors_between_ranks_is_explained(kind):
    known = phrases(section(kind)[1])
    for messages in raised(kind):
        if any(re.search("[a-z]{3}", message) for message in messages):  # others are put together of what is quoted
            assert any(phrase.search(message) for phrase in known for message in messages), (
                f"docs/troubleshooting.md, section {kind}: quote one of {messages} in italics, and say what to do"
            )


@cache
def strings():
    """All that the source could say."""
    return [text for tree in trees() for node in ast.walk(tree) if (text := said(node))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_quoted_of_messages_is_said(kind):
    for line in section(kind)[1].split("\n"):
        if line.startswith("| *"):
            for phrase in phrases(line.split("|")[1]):
                assert any(phrase.search(string) for string in strings()), f"nothing says {phrase.pattern!r}"


def test_pictures_of_pages_are_small():
    measured = {"bench_netlab.svg"}  # made by bench/report.py
    sizes = {path.name: path.stat().st_size for path in Path(ROOT / "docs/pictures").iterdir()}
    assert {name: size for name, size in sizes.items() if size > 150_000 and name not in measured} == {}
