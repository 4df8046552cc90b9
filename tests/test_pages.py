# SPDX-License-Identifier: Apache-2.0
"""What pages point to exists: links, anchors, names of ours, files; and what must be documented is."""

import ast
import re
from collections import defaultdict
from functools import cache
from itertools import chain
from pkgutil import resolve_name

from documentation import DEMO, PAGES, ROOT, commands, parsed
from sources import assert_none, sources

import commrt
from commrt import errors
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.importing import homes
from commrt.runtime.world import World
from commrt.testing.ranks import local_worlds
from commrt.tools.planning.python_calls import home_of
from commrt.training.replica import Replica

LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
REFERENCE = re.compile(r"^::: (\S+)", re.MULTILINE)
OURS = re.compile(r"(?<![\w./-])((?:algorithms|bench|commrt|dev|docs|examples|kernels|studies|tests)/[\w./*-]+)")
TROUBLE = ROOT / "docs" / "troubleshooting.md"


@cache
def prose(page):
    """The page without its blocks of code."""
    return FENCED.sub("", page.read_text())


def wrong(rule, pages):
    """What `rule` says against each page, with the name of the page."""
    return [f"{page.relative_to(ROOT)}: {said}" for page in pages for said in rule(page)]


def spans(page):
    return CODE.findall(prose(page))


@cache
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


def test_every_link_leads_to_a_file_and_a_heading_that_exist():
    def dead(page):
        for target, anchor in links(page):
            file = (page.parent / target).resolve() if target else page
            if not file.exists():
                yield f"{target} is no file"
            elif anchor and anchor not in anchors(file):
                yield f"{target} has no heading {anchor!r}: {sorted(anchors(file))}"

    assert_none(wrong(dead, LINKED))


@cache
def exists(name):
    """Whether a dotted name leads to something: a module, then attributes; a dataclass's fields count."""
    owner, _, last = name.rpartition(".")
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return "." in owner and exists(owner) and last in getattr(resolve_name(owner), "__annotations__", {})
    return True


def test_every_name_of_ours_exists():
    def unknown(page):
        for span in spans(page):
            for name in re.findall(r"(?<![\w./-])commrt(?:\.[A-Za-z_]\w*)+(?!/)", span):
                if not exists(name.removesuffix(".py").removesuffix(".toml")):
                    yield f"{name} in `{span}`"

    assert_none(wrong(unknown, LINKED))


def test_what_the_first_pages_call_by_its_name_alone_is_in_commrt():
    parts = ["algorithms", "backup_workers", "local_sgd", "quantization", "training"]
    ours = set(chain.from_iterable(homes(f"commrt.{part}") for part in parts))

    def hidden(page):
        named_ones = re.findall(r"(?<![\w.])([A-Z]\w+)\(", page.read_text())
        yield from sorted({*named_ones} & ours - {*dir(commrt)})

    assert_none(wrong(hidden, [ROOT / name for name in ("README.md", "docs/index.md", "docs/algorithms.md")]))


def test_worlds_and_replicas_have_what_pages_say_they_have():
    (world,) = local_worlds(1)
    world.close()
    things = {"world": {*dir(World), *vars(world)}, "replica": {*dir(Replica), "last", "model"}}

    def unknown(page):
        for span in spans(page):
            named_ones = re.findall(r"\b(world|replica)\.([a-z_]+)", span)
            yield from (f"`{span}`" for thing, name in named_ones if name not in things[thing])

    assert_none(wrong(unknown, LINKED))


def expanded(span):
    """`span` with each of the words in its braces."""
    before, brace, rest = span.partition("{")
    words, _, after = rest.partition("}")
    return [f"{before}{word}{after}" for word in words.split(",")] if brace else [span]


def test_every_file_of_ours_that_is_named_exists():
    def absent(page):
        for span in spans(page):
            for name in chain.from_iterable(map(OURS.findall, expanded(span))):
                file = name.rstrip(".,/").partition("::")[0]
                found = [*ROOT.glob(file), *ROOT.glob(f"{file}.py")]
                if not found:
                    yield f"{name} in `{span}`"
                chosen = re.search(r" -k [\"']?(\w+)", span)
                if chosen and not any(chosen[1] in each.read_text("utf-8") for each in found if each.suffix == ".py"):
                    yield f"-k {chosen[1]} in `{span}`"

    assert_none(wrong(absent, [page for page in PAGES if "decisions" not in page.parts]))


def test_each_program_of_bench_dev_and_the_audits_has_a_row_in_a_table():
    """Add the question, the command and where the answer stands to bench/README.md or dev/README.md."""
    tables = "".join((ROOT / folder / "README.md").read_text() for folder in ("bench", "dev"))
    modules = [*ROOT.glob("bench/*.py"), *ROOT.glob("dev/*.py"), *ROOT.glob("tests/audits/*.py")]
    programs = (path for path in modules if path.stem.startswith("test_") or "__main__" in path.read_text())
    assert_none(path.name for path in programs if str(path.relative_to(ROOT)) not in tables)


def test_each_study_has_a_page_tests_and_a_row_in_the_table():
    table = (ROOT / "studies/README.md").read_text()
    folders = [path for path in (ROOT / "studies").iterdir() if any(path.glob("*.py"))]
    assert_none(path.name for path in folders if f"]({path.name}/README.md)" not in table)
    assert_none(path.name for path in folders if not (path / "README.md").exists())
    assert_none(path.name for path in folders if path.name != "mnist" and not any(path.glob("test_*.py")))


def test_commands_that_are_named_in_a_line_take_these_options():
    def refused(page):
        for span in spans(page):
            is_ours = span.startswith(("commrt ", f"python {DEMO} "))
            if is_ours and not re.search(r"[A-Z]{2,}|\.\.\.| p\b", span):
                try:
                    for first, *rest in commands(span):
                        parsed(first, rest, whole=False) if first == "commrt" else parsed(DEMO, rest[1:], whole=False)
                except Exception as error:
                    yield f"`{span}`: {error}"

    assert_none(wrong(refused, PAGES))


def listed():
    """What the reference takes from docstrings."""
    written = {name for page in (ROOT / "docs/api").glob("*.md") for name in REFERENCE.findall(page.read_text())}
    # docs/site/hooks.py adds the algorithms
    return written | {f"{home_of(kind)}.{kind.__name__}" for kind in ALGORITHMS.values()}


ROOMS = ("algorithms", "backup_workers", "elastic", "local_sgd", "proof", "quantization", "tools", "training")


def test_the_reference_has_every_public_name_and_no_other_that_does_not_exist():
    names = listed()
    known = {name.rpartition(".")[2] for name in names}
    assert_none(name for name in commrt.__all__ if f"commrt.{name}" not in names)
    assert_none(
        f"commrt.{room}.{name}" for room in ROOMS for name in getattr(commrt, room).__all__ if name not in known
    )
    assert_none(name for name in names if not exists(name))


KINDS = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.CommrtError)]


def section(kind):
    return re.search(rf"^### {kind}$(.*?)(?=^##|\Z)", TROUBLE.read_text(), re.MULTILINE | re.DOTALL)


def phrases(text):
    """What is quoted of messages, in italics, as patterns."""
    found = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text)
    return [re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.(?=\W|$):?\s*", phrase)))) for phrase in found]


def test_every_error_has_its_section():
    """Add '### KIND' to docs/troubleshooting.md: what it means and what to do."""
    assert_none(kind for kind in KINDS if not section(kind))


def said(node):
    """A string as it stands in the source, with # where values stand; None of anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "#" for part in node.values)
    if isinstance(node, ast.BinOp):
        return said(node.left)
    return None


def raised():
    """For every place that makes an error: its kind, and the messages that it can have, one or some."""
    for source in sources("commrt", "algorithms"):
        named_texts = defaultdict(list)
        for node in source.all(ast.Assign):
            if isinstance(node.targets[0], ast.Name) and (text := said(node.value)):
                named_texts[node.targets[0].id].append(text)
        for node in source.all(ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                first = node.args[0]
                yield node.func.id, named_texts[first.id] if isinstance(first, ast.Name) else [said(first) or ""]


ADVICE = re.compile(
    r"(?i)\b(?:call|do(?! not)|give|is there a route|leave|limit|look at|make|raise|run with|set|start|wait\(\))(?!\w)"
)


def test_every_message_of_errors_between_ranks_says_what_to_do_or_is_explained():
    """Or quote one of the messages in italics in the kind's section of docs/troubleshooting.md, and say what to do."""
    local = {"CommrtError", "ScheduleError", "UsageError"}
    known = {kind: phrases(section(kind)[1]) for kind in KINDS if kind not in local}
    assert_none(
        (kind, messages)
        for kind, messages in raised()
        if kind in known
        and any(re.search("[a-z]{3}", message) for message in messages)  # others are put together of what is quoted
        and not all(map(ADVICE.search, messages))
        and not any(phrase.search(message) for phrase in known[kind] for message in messages)
    )


def test_what_is_quoted_of_messages_is_said():
    strings = {text for source in sources("commrt", "algorithms") for node in source.nodes if (text := said(node))}
    quoting = [line for kind in KINDS for line in section(kind)[1].split("\n") if line.startswith("| *")]
    quoted = [phrase for line in quoting for phrase in phrases(line.split("|")[1])]
    assert_none(each.pattern for each in quoted if not any(map(each.search, strings)))


NUMBER = r"(?<![\w.])(?<!torch )(?<!Python )(?<!to )(\d[\d.,]*)"  # and no version
FIGURE = re.compile(NUMBER + r"(?: (?:%|ms|us|s|times)(?!\w)|(?<=\.\d\d)(?!\w|\.\d)| of \d)")
PEER = r"DDP|Gloo|torchft|NCCL|all-reduce|without|one process"
TERMS = re.compile(rf"(?s)(?=.*(?:{PEER})).*(?:\]\([^)#]|`(?:sudo )?(?:python|pytest|make|commrt) )")


def test_each_figure_of_the_first_pages_has_its_peer_and_its_command_and_stands_where_results_do():
    """A paragraph, item or row with a time, share or ratio names its peer, and gives a command or leads to it."""
    results = [page for page in PAGES if re.search("docs/(benchmarks|conformance|evidence)|studies/", str(page))]
    measured = {number for page in results for number in re.findall(r"\d[\d.,]*\b", page.read_text())}

    def bare(page):
        for piece in re.split(r"\n(?=[|\-\n])", prose(page)):
            yield from (piece for each in FIGURE.findall(piece) if each not in measured or not TERMS.match(piece))

    assert_none(wrong(bare, [ROOT / "README.md", ROOT / "docs" / "index.md"]))


NOT_FOR_USERS = {"architecture.md", "benchmarks.md", "conformance.md", "evidence.md", "torch_issue.md", "versions.md"}


def test_pages_for_users_have_at_most_16000_words():
    """How-to, concepts and reference; evidence and decisions are not counted. Shorten before you add."""
    folders = ("docs", "docs/algorithms", "docs/api")
    docs = [page for name in folders for page in (ROOT / name).glob("*.md") if page.name not in NOT_FOR_USERS]
    words = {page: len(page.read_text().split()) for page in (ROOT / "README.md", ROOT / "examples/README.md", *docs)}
    assert sum(words.values()) <= 16_000, sorted(words.items(), key=lambda item: -item[1])
