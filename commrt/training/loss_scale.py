# SPDX-License-Identifier: Apache-2.0
"""The scales of `GradScaler` objects, which multiply gradients and must be equal on all ranks.

A scaler is known if it was given to `attach`, or, where ranks train synchronously, once torch's
`GradScaler.step` has stepped an optimizer; a subclass whose own `step` never calls that is to be
given. Ranks compare scales in the headers of the steps that follow, with the optimizers' settings.
On the thread that steps or runs the backward pass; texts for errors also on the one that unpacks.
Changes no scaler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch.amp import GradScaler

_FILE = GradScaler.step.__code__.co_filename


class LossScales:
    """The scales that one rank knows.

    A scale on a GPU is read once, as reading waits for the GPU. Ranks that `keep_pace` make the
    same steps. Others may come late, and know other scalers than given ones, or a scale on a GPU
    that has moved: these are left out.
    """

    def __init__(self, owners: Iterable[object] = (), *, keep_pace: bool = True) -> None:
        self._keep_pace = keep_pace
        self.known: dict[int, tuple[object, Callable[[], float]]] = {}
        """By id, a scaler and the function that returns its scale; `StepGuard` reads if any is."""
        self.begin(owners)

    def begin(self, owners: Iterable[object]) -> None:
        """Know those of `owners` that have a scale, and no others."""
        self.known.clear()
        for owner in owners:
            if callable(getattr(owner, "get_scale", None)):
                self._note(owner)

    def notice(self) -> None:
        """Know the scaler in whose ``step`` the caller is, if there is one."""
        if not self._keep_pace:
            return
        frame = sys._getframe().f_back  # noqa: SLF001  # an optimizer does not know who steps it
        while frame is not None:
            if frame.f_code.co_filename == _FILE and "self" in frame.f_code.co_varnames:
                self._note(frame.f_locals["self"])
                return
            frame = frame.f_back

    def _note(self, scaler: Any) -> None:
        if id(scaler) in self.known:
            return
        if getattr(scaler, "_device", "cpu") == "cpu":
            self.known[id(scaler)] = scaler, scaler.get_scale
        elif self._keep_pace:
            # cached at first use, as `attach` makes scalers equal
            self.known[id(scaler)] = scaler, cache(scaler.get_scale)

    def values(self) -> list[float]:
        """Return the scales in order, as ranks may come to know scalers in different orders."""
        return sorted(float(scale()) for _, scale in self.known.values())

    def __str__(self) -> str:
        return ", ".join(
            f"{type(scaler).__name__} scale={scale():g}" for scaler, scale in self.known.values()
        )
