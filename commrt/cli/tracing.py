# SPDX-License-Identifier: Apache-2.0
"""``commrt train --trace FILE``: the timelines of all ranks in one file."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.cli.outputs import require_writable, write
from commrt.recording import Timeline, chrome_trace
from commrt.runtime.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_file", "traced"]


def check_file(path: str) -> None:
    """Raise `UsageError` if nothing can be written there."""
    require_writable("--trace", path, "trace.json")


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
        text = json.dumps(chrome_trace(events))
        write("--trace", path, lambda: Path(path).write_text(text, encoding="utf-8"))
    world.agree("trace written")  # rank 0 may hold the store
