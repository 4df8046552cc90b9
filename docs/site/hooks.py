# SPDX-License-Identifier: Apache-2.0
"""Add pages to the site that are not in docs/: files from elsewhere in the repository, and the help
of `commrt`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from enum import Enum
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from commrt.algorithms import catalogue
from commrt.tools.commands.app import app
from commrt.tools.planning.python_calls import home_of

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "studies").glob("*/README.md"))
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "bench/FINDINGS.md": "findings.md",
    "bench/README.md": "bench.md",
    "kernels/README.md": "kernels.md",
    "studies/README.md": "studies.md",
    **{
        f"studies/{path.parent.name}/README.md": f"studies/{path.parent.name}.md"
        for path in STUDIES
    },
}
"""Page of the site, by file of the repository."""
MOVED = {
    "algorithms/halving_doubling": "algorithms/all_reduce.html#halving-doubling",
    "algorithms/ring": "algorithms/all_reduce.html#ring",
    "algorithms/torus2d": "algorithms/all_reduce.html#2d-torus",
    "algorithms/trees_and_slices": "algorithms/all_reduce.html#double-tree",
    "api/planning": "api/tools.html#prices",
    "api/recipe": "api/training.html#large-batches",
    "api/recording": "api/training.html#recording",
    "api/testing": "api/tools.html#testing",
    "backup_workers": "algorithms/backup_workers.html",
    "integrations": "ddp.html",
    "nccl": "gpus.html",
    "pricing": "simulate.html#how-a-price-is-computed",
    "profiling": "observe.html",
    "recipe": "large_batches.html",
    "stragglers": "algorithms/backup_workers.html#choose-how-many-backups",
    "torch_conformance": "conformance.html",
}
"""Where pages of earlier versions went."""
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={there}">
<a href="{there}">This page has moved.</a>
"""
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in ELSEWHERE.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "api/command.md", content=command_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to pages of the site; show only the text of links to other files.

    A line that is a link to a program becomes the program. In the reference, write the entries of
    what `commrt/algorithms` registers.
    """
    here = page.file.src_uri
    if here == "api/algorithms.md":
        markdown = markdown.replace("<!-- registered algorithms -->", registered_algorithms())
        markdown = markdown.replace("<!-- registered functions -->", registered_functions())
    source = next(
        (source for source, other in ELSEWHERE.items() if other == here != "index.md"),
        f"docs/{here}",
    )

    def led(link: re.Match[str]) -> str:
        text = link[1]
        target = link[2]
        anchor = link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = ELSEWHERE.get(
            path, path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        if path.endswith(".py") and f"\n{link[0]}\n" in link.string:
            return f"```python\n{(ROOT / path).read_text()}```"
        if inside is None:
            return text
        kept = "" if inside == "index.md" else anchor  # index.md has other headings than the README
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{kept})"

    return LINK.sub(led, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Let the names of pages of earlier versions lead to where these went."""
    for old, new in MOVED.items():
        page = Path(config.site_dir, f"{old}.html")
        page.write_text(
            REDIRECT.format(there=posixpath.relpath(new, posixpath.dirname(old) or "."))
        )


def registered_algorithms() -> str:
    """Return the entries of the classes that `attach` takes."""
    classes = catalogue.ALGORITHMS.values()
    return "\n\n".join(f"::: {home_of(each)}.{each.__name__}" for each in classes)


def registered_functions() -> str:
    """Return the entries of the modules that make schedules, with their functions only."""
    options = "heading_level: 3, show_root_heading: false, show_root_toc_entry: false"
    entry = '::: {}\n    options: {{ {}, filters: ["!^[A-Z_]"] }}'
    return "\n\n".join(entry.format(each.__name__, options) for each in catalogue.MODULES)


def command_page() -> str:
    """Return the page of all commands with their options, from the help of `commrt`."""
    codes = "Exit codes: 0 success, 1 runtime failure, 2 invalid input, 130 interrupted."
    about = (
        "Check a machine, prove schedules, predict and draw clusters: `pip install 'commrt[cli]'`."
        f" `commrt COMMAND --help` prints the same as this page. {codes}"
    )
    named = sorted(_commands(app, "commrt"))
    rows = [f"| [{name}](#{name.replace(' ', '-')}) | {_purpose(each)} |" for name, each in named]
    parts = ["# The command", about, "\n".join(["| command | |", "|---|---|", *rows])]
    for name, function in named:
        hints = get_type_hints(function, include_extras=True)
        rows = [_row(each, hints[each.name]) for each in signature(function).parameters.values()]
        table = "\n".join(["| option | default | |", "|---|---|---|", *rows])
        parts += [f"## {name}", getdoc(function) or "", table]
    return "\n\n".join(parts) + "\n"


def _commands(group: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each command of `group` and of the groups in it, by its full name."""
    for command in group.registered_commands:
        yield f"{name} {command.name or command.callback.__name__}", command.callback
    for inner in group.registered_groups:
        yield from _commands(inner.typer_instance, f"{name} {inner.name}")


def _purpose(function: Callable[..., Any]) -> str:
    """Return the first sentence of its docstring, in one line."""
    return " ".join((getdoc(function) or "").split("\n\n")[0].split())


def _row(parameter: Parameter, hint: Any) -> str:
    """Return the row of one option or argument."""
    kind, info = get_args(hint)
    kinds = [each for each in (kind, *get_args(kind)) if isinstance(each, type)]
    offered = [str(one.value) for each in kinds if issubclass(each, Enum) for one in each]
    told = (info.help or "").replace("|", "\\|") + (
        f" One of {', '.join(offered)}." if offered else ""
    )
    default = info.show_default if isinstance(info.show_default, str) else parameter.default
    _is_observed = not any(default is nothing for nothing in (None, False, Parameter.empty))
    shown = str(getattr(default, "value", default)) if _is_observed else ""
    return f"| `{_name(parameter, info)}` | {shown} | {told} |"


def _name(parameter: Parameter, info: Any) -> str:
    """Return the name as a user types it. Typer takes the first declared name for a default."""
    if isinstance(info, typer.models.ArgumentInfo):
        return parameter.name.upper()
    declared = (one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str))
    return next(
        (one for one in declared if one.startswith("--")), f"--{parameter.name.replace('_', '-')}"
    )
