# SPDX-License-Identifier: Apache-2.0
"""``commrt train --trace FILE``: the timelines of all ranks in one file."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.errors import UsageError
from commrt.recording import Timeline, chrome_trace
from commrt.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_file", "traced"]


def check_file(path: str) -> None:
    """Raise `UsageError` if nothing can be written there."""
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"--trace {path}: there is no folder {Path(path).resolve().parent}, make it first")
    if Path(path).is_dir():
        raise UsageError(f"--trace {path} is a folder: give a file, such as {Path(path) / 'trace.json'}")


@contextmanager
def traced(world: World, path: str | None) -> Iterator[None]:
    """Record what happens meanwhile, and let the first rank write it; collective, and nothing without a `path`."""
    if path is None:
        yield
        return
    world.recorder = timeline = Timeline(world.rank)
    yield
    world.recorder = None
    world.store.set(f"timeline/{world.rank}", json.dumps(timeline.events))
    world.agree("trace")
    if world.rank == world.members[0]:
        events = [event for rank in world.members for event in json.loads(world.store.get(f"timeline/{rank}"))]
        Path(path).write_text(json.dumps(chrome_trace(events)), encoding="utf-8")
    world.agree("trace written")  # rank 0 may hold the store
