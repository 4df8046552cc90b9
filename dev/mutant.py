# SPDX-License-Identifier: Apache-2.0
"""A mutant: one changed operator, constant, condition or left-out call in one function of the
product.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOMS = {
    "schedule": ("commrt/schedule.py",),
    "proof": ("commrt/proof/*.py",),
    "program": (
        "commrt/program.py",
        "commrt/dependencies.py",
        "commrt/signal_waits.py",
        "commrt/nccl_groups.py",
    ),
    "algorithms": ("algorithms/*.py",),
    "executor": ("commrt/runtime/*.py",),
    "transports": ("commrt/transport/*.py",),
    "buckets": ("commrt/buckets/*.py",),
    "training": ("commrt/training/*.py",),
    "membership": ("commrt/elastic/*.py", "commrt/store/*.py"),
    "backup workers": ("commrt/backup_workers/*.py",),
    "local SGD": ("commrt/local_sgd/*.py",),
    "quantization": ("commrt/quantization/*.py", "commrt/quantizer.py"),
    "c10d": ("commrt/c10d/*.py",),
    "kernel definitions": (
        "kernels/plain_torch.py",
        "kernels/layout.py",
        "kernels/tables.py",
        "kernels/dispatch.py",
    ),
}

OTHER_OPERATOR: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """The change, found again in another commit by its file, function, text and place among equal
    texts.
    """

    room: str
    file: str
    function: str
    before: str
    nth: int
    after: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of the product below `root`, as many of each room as of the others."""
    random = Random(seed)
    chosen = list[Mutant]()
    for at, (room, patterns) in enumerate(ROOMS.items()):
        files = [file for pattern in patterns for file in sorted(root.glob(pattern))]
        share = count * (at + 1) // len(ROOMS) - count * at // len(ROOMS)
        chosen += random.sample(
            [mutant for file in files for mutant in of_file(root, room, file)], share
        )
    return chosen


def of_file(root: Path, room: str, file: Path) -> Iterator[Mutant]:
    """Yield each mutant of the functions in `file`."""
    for name, function in functions(ast.parse(file.read_text("utf-8"))):
        seen = dict[str, int]()
        for node in own_nodes(function):
            before = ast.unparse(node)
            nth = seen[before] = seen.get(before, -1) + 1
            for after in changed(node):
                yield Mutant(room, str(file.relative_to(root)), name, before, nth, after)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield each function with its qualified name, but for kernels, which Triton compiles."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = prefix + node.name
            if isinstance(node, Function) and not any(
                "jit" in ast.unparse(one) for one in node.decorator_list
            ):
                yield name, node
            yield from functions(node, name + ".")
        else:
            yield from functions(node, prefix)


def own_nodes(function: Function) -> Iterator[ast.stmt | ast.expr]:
    """Yield the statements and expressions in the body of `function`, but for text and the
    functions inside it.
    """
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.JoinedStr | ast.Raise | ast.AnnAssign):
            continue
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        waiting += reversed(list(ast.iter_child_nodes(node)))


def changed(node: ast.stmt | ast.expr) -> Iterator[str]:
    """Yield the texts that may stand for `node` in a mutant."""
    match node:
        case ast.Compare(left, [one], right) if type(one) in OTHER_OPERATOR:
            yield ast.unparse(ast.Compare(left, [OTHER_OPERATOR[type(one)]()], right))
        case ast.BinOp(left, one, right) if type(one) in OTHER_OPERATOR and not has_text(node):
            yield ast.unparse(ast.BinOp(left, OTHER_OPERATOR[type(one)](), right))
        case ast.BoolOp(one, values):
            yield ast.unparse(ast.BoolOp(OTHER_OPERATOR[type(one)](), values))
        case ast.UnaryOp(ast.Not(), operand):
            yield ast.unparse(operand)
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield repr(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))
        case ast.Expr(ast.Call()):
            yield "None"


def has_text(node: ast.AST) -> bool:
    """Tell whether a string stands in `node`: adding strings is no arithmetic."""
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node)
    )


def applied(mutant: Mutant, root: Path) -> str:
    """Return the text of the mutant's file below `root` with its change.

    Raises LookupError where its place is gone.
    """
    text = (root / mutant.file).read_bytes()
    node = found(mutant, ast.parse(text))
    lines = text.splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    after = mutant.after if isinstance(node, ast.stmt) else f"({mutant.after})"
    return (text[:begin] + after.encode() + text[end:]).decode()


def found(mutant: Mutant, tree: ast.AST) -> ast.stmt | ast.expr:
    """Return the node that the mutant changes."""
    equal = [
        node for node in own_nodes(function_of(mutant, tree)) if ast.unparse(node) == mutant.before
    ]
    if len(equal) <= mutant.nth:
        raise LookupError(f"{mutant.file}: {mutant.function} no longer has {mutant.before!r}")
    return equal[mutant.nth]


def function_of(mutant: Mutant, tree: ast.AST) -> Function:
    """Return the function that the mutant changes."""
    for name, function in functions(tree):
        if name == mutant.function:
            return function
    raise LookupError(f"{mutant.file} no longer has the function {mutant.function}")


def first_line(mutant: Mutant, root: Path) -> tuple[int, int]:
    """Return line and column of the first statement of the mutant's function,
    after its docstring.
    """
    body = function_of(mutant, ast.parse((root / mutant.file).read_bytes())).body
    text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    first = body[1] if text and len(body) > 1 else body[0]
    decorators = getattr(first, "decorator_list", [])
    return (decorators[0].lineno if decorators else first.lineno), first.col_offset
