# SPDX-License-Identifier: Apache-2.0
"""The project's modules as text and as trees, each parsed once for all rules that tests check."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    text: str
    nodes: tuple[ast.AST, ...]
    """All nodes of its tree, the module first."""

    @property
    def name(self):
        return str(self.path.relative_to(ROOT))

    def all(self, *kinds):
        return [node for node in self.nodes if isinstance(node, kinds)]


def parsed(path, text):
    return Source(path, text, tuple(ast.walk(ast.parse(text))))


@cache
def read(path):
    return parsed(path, path.read_text())


def sources(*folders):
    """Return every module in these folders of the project; a linked folder counts only by its own name."""
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    linked = {ROOT / "commrt" / "kernels", ROOT / "commrt" / "algorithms"}
    return [read(path) for path in sorted(paths) if not linked & {*path.parents}]


def modules():
    return sources("commrt", "kernels", "algorithms")


def offences(rule, found):
    """Return what `rule`, called with each source of `found`, says against it, each with the name of the file."""
    return [f"{source.name}: {said}" for source in found for said in rule(source)]


def assert_none(found):
    """Fail with all that was found, one a line; pytest alone would show the first."""
    lines = [str(each) for each in found]
    assert not lines, "\n" + "\n".join(lines)
