# SPDX-License-Identifier: Apache-2.0
"""Gives the backend PEERS_BACKEND to whoever asks torch.distributed for Gloo, or for none by name.

`dev/peers.py` has each Python of a test run import this as it starts, before torch. It makes the
file PEERS_OPENED when a group was asked for. With PEERS_SAY_GLOO, ``dist.get_backend()`` says
"gloo", for suites that compare the name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

C10D = "torch.distributed.distributed_c10d"


class Finder(importlib.abc.MetaPathFinder):
    """Lets `put` change torch's module as soon as it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return torch's own spec, with a loader that calls `put`."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == C10D else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_put(module: ModuleType) -> None:
            load(module)
            put(module)

        spec.loader.exec_module = load_and_put  # type: ignore[method-assign]
        return spec


def put(c10d: Any) -> None:
    """Change the one function of torch that opens groups."""
    open_group = c10d._new_process_group_helper
    say = c10d.get_backend

    def opened(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        if "gloo" in str(backend) or str(backend) == "undefined":
            import commrt.c10d  # noqa: F401, PLC0415  # needs the module that is changed here

            backend = c10d.Backend(os.environ["PEERS_BACKEND"])
            options.pop("backend_options", None)  # are Gloo's
            Path(os.environ["PEERS_OPENED"]).touch()
        return open_group(size, rank, ranks, backend, *args, **options)

    def said(group: Any = None) -> Any:
        name = say(group)
        return "gloo" if name == os.environ["PEERS_BACKEND"] else name

    c10d._new_process_group_helper = opened
    if os.environ.get("PEERS_SAY_GLOO"):
        c10d.get_backend = said


if os.environ.get("PEERS_BACKEND", "gloo") != "gloo":
    sys.meta_path.insert(0, Finder())
