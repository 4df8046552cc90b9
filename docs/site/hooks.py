# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does beside its own: pages that live elsewhere in the repository, and the command's own help as one."""

from __future__ import annotations

import posixpath
import re
from enum import Enum
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from commrt.cli.app import app

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "bench/FINDINGS.md": "findings.md",
    "kernels/README.md": "kernels.md",
}
"""File of the repository -> page of the site."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not under docs/."""
    for source, page in ELSEWHERE.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "api/command.md", content=command_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to pages of the site; what is no page of it, such as a program, is only named."""
    here = page.file.src_uri
    source = next((source for source, other in ELSEWHERE.items() if other == here != "index.md"), f"docs/{here}")

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return text
        kept = "" if inside == "index.md" else anchor  # the README has other headings than the page in its place
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{kept})"

    return LINK.sub(led, markdown)


def command_page() -> str:
    """All commands with their options, as the command itself describes them."""
    codes = "Exit codes: 2 for bad input, 1 for bad luck, 130 for Ctrl-C."
    parts = ["# The command", f"`commrt COMMAND --help` says the same. {codes}"]
    for function in sorted((command.callback for command in app.registered_commands), key=lambda each: each.__name__):
        hints = get_type_hints(function, include_extras=True)
        rows = [_row(each, hints[each.name]) for each in signature(function).parameters.values()]
        table = "\n".join(["| option | default | |", "|---|---|---|", *rows])
        parts += [f"## commrt {function.__name__}", getdoc(function) or "", table]
    return "\n\n".join(parts) + "\n"


def _row(parameter: Parameter, hint: Any) -> str:
    """Of its table."""
    kind, info = get_args(hint)
    kinds = [each for each in (kind, *get_args(kind)) if isinstance(each, type)]
    offered = [str(one.value) for each in kinds if issubclass(each, Enum) for one in each]
    told = (info.help or "").replace("|", "\\|") + (f" One of {', '.join(offered)}." if offered else "")
    default = info.show_default if isinstance(info.show_default, str) else parameter.default
    is_told = not any(default is nothing for nothing in (None, False, Parameter.empty))
    shown = str(getattr(default, "value", default)) if is_told else ""
    return f"| `{_name(parameter, info)}` | {shown} | {told} |"


def _name(parameter: Parameter, info: Any) -> str:
    """As it is typed; typer takes the first name that is declared for a default."""
    if isinstance(info, typer.models.ArgumentInfo):
        return parameter.name.upper()
    declared = (one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str))
    return next((one for one in declared if one.startswith("--")), f"--{parameter.name.replace('_', '-')}")
