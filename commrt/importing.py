# SPDX-License-Identifier: Apache-2.0
"""What ``import commrt`` does without torch: it names what is imported later, and prepares torch
once that is imported.

Names of a package are imported when they are first used. Its ``__init__.pyi`` is the one list of
them, for type checkers and at run time: each line imports names from the modules that define them,
and nothing reads it before a name is used.

torch may be imported before commrt or after it. torch.distributed learns the name of the backend,
whose code is imported when a group is opened. torch's compiler learns that it must leave alone what
runs between the graphs of a compiled model or step: the backend's functions, and those that
exchange after an optimizer's step. It still traces the hooks of an attached model, which would cut
its graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import dropwhile, islice
from types import FunctionType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

NAME = "commrt"
"""Of the backend."""


def names_of(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of `package`, whose names are those of its
    ``__init__.pyi``.
    """

    def get(name: str) -> object:
        if name == "__all__":
            return sorted(name for name, home in homes(package).items() if home != package)
        if name.startswith("__") or name not in homes(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes(package)[name]
        return (
            import_module(f"{home}.{name}")
            if home == package
            else getattr(import_module(home), name)
        )

    return get, lambda: sorted({*vars(sys.modules[package]), *homes(package)})


@cache
def homes(package: str) -> dict[str, str]:
    """Return by name the module that defines it; for a package inside `package`,
    that is `package`.
    """
    import ast  # noqa: PLC0415  # takes as long as the rest of ``import commrt``
    from pkgutil import get_data  # noqa: PLC0415  # reads from archives too

    stub = ast.parse(get_data(package, "__init__.pyi") or b"")
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}


def prepare() -> None:
    """Register the backend and keep torch's compiler out, now or when the two are imported."""
    _when_imported("torch", register)
    _when_imported("torch._dynamo", _skip_frames)


def register() -> None:
    """Tell torch.distributed of the backend, unless that was done, or this torch has no
    torch.distributed.
    """
    torch = sys.modules["torch"]
    dist = import_module("torch.distributed")
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:  # noqa: SLF001  # torch refuses a second one
        return
    devices = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(options: Any, backend_options: Any = None) -> Any:
    return import_module("commrt.c10d").create(options, backend_options)


def _skip_frames() -> None:
    for name in ("c10d", "training.after_step", "training.riding"):
        sys.modules["torch._dynamo"].trace_rules.add(f"{__package__}.{name}")


def untraced(kind: type[T]) -> type[T]:
    """Let torch's compiler leave the methods of `kind` alone, and all that they call, such as
    numpy's functions.
    """
    frames = sys.modules["torch"]._C._dynamo.eval_frame  # noqa: SLF001  # torch.compiler.disable takes seconds to import
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.6 has none
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # noqa: SLF001
        file = sys.modules[kind.__module__].__file__
        for method in vars(kind).values():
            if isinstance(method, FunctionType) and method.__code__.co_filename == file:
                frames.set_code_exec_strategy(method.__code__, skip)
    return kind


def _when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` when the module `name` has been imported: now, or later on the thread that does
    it.
    """
    if (module := sys.modules.get(name)) is None:
        sys.meta_path.insert(0, _Finder(name, action))
    elif not getattr(
        module.__spec__, "_initializing", False
    ):  # else it is imported right now, and imports commrt
        action()


class _Finder:
    """Finds one module like the finders behind it do, and calls a function when it has been
    imported.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for all modules but one; see ``importlib.abc.MetaPathFinder``."""
        if name != self._name:
            return None
        behind = islice(dropwhile(lambda finder: finder is not self, tuple(sys.meta_path)), 1, None)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
