# SPDX-License-Identifier: Apache-2.0
"""The tag that a caller gives to a transfer: what it is called without one, and what is refused.

Constants and a pure check, for any thread.
"""

from __future__ import annotations

from commrt.errors import UsageError
from commrt.transport.protocol import Tag

UNNAMED = Tag(0, "run")
"""Of a schedule to which the caller gave no tag."""
UNNAMED_SUM = Tag(0, "all_reduce")
"""Of a sum to which the caller gave no tag."""


def check_tag(tag: Tag) -> None:
    """Raise `UsageError` unless `tag` is one."""
    if not isinstance(tag, Tag):
        raise UsageError(f"tag={tag!r:.80}: give a commrt.Tag(step, bucket), or leave it out")
