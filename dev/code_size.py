# SPDX-License-Identifier: Apache-2.0
"""Measure the size and shape of the code, one column per checkout.

``python dev/code_size.py [CHECKOUT ...]``; with an older commit:
``git worktree add /tmp/before COMMIT`` and ``python dev/code_size.py /tmp/before .``
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles

ROOMS = ("commrt", "kernels", "algorithms")


def modules(root: Path, room: str) -> Iterator[Path]:
    """Yield the modules of a room, without what links in it lead to."""
    for path in sorted((root / room).rglob("*.py")):
        inside = path.relative_to(root / room).parts
        if not any((root / room / part).is_symlink() for part in inside[:1]):
            yield path


def name(root: Path, path: Path) -> str:
    """Return the import name of a module."""
    parts = path.relative_to(root).with_suffix("").parts
    prefix = () if parts[0] == "commrt" else ("commrt",)
    return ".".join(part for part in (*prefix, *parts) if part != "__init__")


def imported(tree: ast.Module) -> set[str]:
    """Return what a module imports when it is imported itself."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def cycles(graph: Mapping[str, set[str]]) -> int:
    """Return how many modules are in an import cycle."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (each := todo.pop()) not in seen:
                seen.add(each)
                todo += graph[each]
        return seen

    return sum(each in reached(each) for each in graph)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the length of a function without its signature and docstring."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        body = body[1:]
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1


def stations(root: Path) -> int:
    """Return how many stations docs/architecture.md counts on the walk of a gradient, as tests
    check; 0 without it.
    """
    page = root / "docs" / "architecture.md"
    _, _, walk = (
        page.read_text().partition("## The walk of a gradient") if page.exists() else ("", "", "")
    )
    return len(re.findall(r"^\d\. `", walk.partition("\n## ")[0], re.MULTILINE))


def measure(root: Path) -> dict[str, float]:
    """Return the figures of one checkout."""
    own = list(modules(root, "commrt"))
    every = [path for room in ROOMS for path in modules(root, room)]
    trees = {name(root, path): ast.parse(path.read_text()) for path in every}
    lines = {path: path.read_text().count("\n") for path in every}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    bodies = [
        body_lines(node)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    graph = {
        each: {to for to in imported(tree) if to in trees and to != each}
        for each, tree in trees.items()
    }
    folders = {path.parent for path in own} - {root / "commrt"}
    return {
        "lines of commrt/ (without its two links)": sum(lines[path] for path in own),
        "lines with kernels/ and algorithms/": sum(lines.values()),
        "folders in commrt/": len(folders),
        "modules beside them": sum(path.parent == root / "commrt" for path in own),
        "modules of commrt/": len(own),
        "median lines of a module": median(lines[path] for path in own),
        "longest module, lines": max(lines[path] for path in own),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": len(bodies),
        "median body of a function, lines": median(bodies),
        "90th percentile, lines": quantiles(bodies, n=10)[-1],
        "longest body, lines": max(bodies),
        "modules in import cycles": cycles(graph),
        "stations of a gradient's walk": stations(root),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[Path(__file__).parent.parent])
    columns = [measure(root.resolve()) for root in parser.parse_args().checkouts]
    for row in columns[0]:
        print(f"{row:<42}" + "".join(f"{column[row]:>10,g}" for column in columns))


if __name__ == "__main__":
    main()
