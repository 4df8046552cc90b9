# SPDX-License-Identifier: Apache-2.0
"""Keys on the store that outlive a call: where they stand, and when they go.

A launcher's store lives as long as the launcher, and a job may make groups and attach models as
often as it likes. Requests wait on the caller's thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import PrefixStore, Store

MODEL = re.compile(r"model (\d+)/")


def delete_keys(store: Store, is_over: Callable[[str], bool] = lambda _: True) -> None:
    """Delete those of the keys of `store` for which `is_over`.

    They stay in a store that cannot list them: of torch before 2.13, or of a kind of its own.
    """
    # a store that was lost is noticed by the next request
    with suppress(AttributeError, RuntimeError):
        for key in filter(is_over, store.list_keys()):
            store.delete_key(key)


def store_of_model(store: Store, number: int) -> Store:
    """Return the part of a world's `store` for the model attached as the `number`-th."""
    return PrefixStore(f"model {number}", store)


def delete_earlier_models(store: Store, number: int) -> None:
    """Delete what models attached before the `number`-th left, once no rank uses them any more."""

    def is_over(key: str) -> bool:
        found = MODEL.match(key)
        return found is not None and int(found[1]) < number

    delete_keys(store, is_over)
