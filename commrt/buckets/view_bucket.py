# SPDX-License-Identifier: Apache-2.0
"""A bucket whose gradients live on its wire: ``param.grad`` is a view of it, and never unpacked.

It sends nothing itself; see `GradientBucket` and `ViewBucket` for threads, and what they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from commrt.buckets.gradient_bucket import CHANGED, GradientBucket, kind_of
from commrt.errors import UsageError
from commrt.kernels.packing import NO_PARTS, Parts, Repeatable
from commrt.kernels.torch_packing import TorchPacking, views_of

GRAPH = (
    "the gradient of {name} has a graph of its own, by create_graph=True, which would end where its"
    ' values are moved: attach without gradients="views"'
)

requires_grad_of = attrgetter("requires_grad")


class ViewBucket(GradientBucket):
    """A bucket whose gradients stay on the wire between steps, each at its own place.

    A gradient that autograd made elsewhere is scaled into its place, and one that is there already
    is scaled in place. Plain torch, as on a CPU, does that with large ones in `move_in` as soon as
    each is there, while it is in the processor's cache. Small ones move together when the bucket
    leaves. Where Triton packs, one launch does it for all.

    Threads are those of `GradientBucket`, and before `take` the thread of the backward pass calls
    `move_in`. Each hands all on to the next one, with the originals and what has moved in:
    `move_in`, `take`, `pack`, `unpack` or `finish_replay`, then `assign_missing` and `release`.

    Gradients themselves are set by `move_in` (``param.grad``), and at the end by `assign_missing`,
    to what `_settle` has left in `_made`.

    Replaces of its parent, beside public methods: `_require_fits`, which `take` calls,
    `_require_fit`, and `_memory_for`, which `_make_missing` calls. Writes there `_made` and
    `_scale`, and reads what the constructor and `take` have set.
    """

    unpacks_wire = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # what ``param.grad`` is, by place; only `_ensure_original` makes one anew
        # .data: an original counts its own writes, and is no view that autograd treats specially
        self._originals = [view.data for view in self._views()]
        self._addresses = [original.data_ptr() for original in self._originals]
        self._places = {name: place for place, name in enumerate(self.names)}
        self._moved_scale = 1.0  # of what has moved in
        # by place, how often the original was written to by the end of `move_in`; `release` empties
        # it
        self._moved: dict[int, int] = {}
        # None where Triton packs
        self._torch_packing = self._packing if isinstance(self._packing, TorchPacking) else None
        self.moves_in = self._torch_packing is not None and not self._torch_packing.packs_at_once
        """True if `move_in` does something."""
        self._overlaps.claim(self.wire)

    def _views(self) -> list[Tensor]:
        return views_of(self.wire, self.layout, self._like)

    def _ensure_original(self, place: int) -> Tensor:
        """Make the original at `place` anew if ``grad.data = ...`` or `Module.to` let it point
        elsewhere; return it.
        """
        original = self._originals[place]
        is_there = original.data_ptr() == self._addresses[place]
        if (
            not is_there
            or (original.dtype, original.shape, original.stride()) != self._kinds[place]
        ):
            original = self._originals[place] = self._views()[place].data
        return original

    def move_in(self, name: str, scale: float) -> None:
        """Write the gradient of `name`, which is complete, times `scale` to the wire, and leave it
        there.

        Does nothing where all move together.
        """
        place = self._places[name]
        grad = self.params[place][1].grad
        original = self._ensure_original(place)
        if self._torch_packing is None or not self.moves_in or grad is None:
            return
        self._require_movable(place, grad, original)
        self._torch_packing.pack_one(place, grad, scale)
        self._moved_scale = scale
        if grad is not original:
            self.params[place][1].grad = original
        self._moved[place] = original._version  # noqa: SLF001  # nothing else tells

    def _require_movable(self, place: int, grad: Tensor, original: Tensor) -> None:
        """Raise `UsageError` for a gradient that cannot be copied to its place, the `original`."""
        if grad is not original:
            super()._require_fit(place, grad)
            if grad.requires_grad:
                raise UsageError(GRAPH.format(name=self.names[place]))
            if grad.data_ptr() != self._addresses[place]:
                self._overlaps.require_apart(self.names[place], grad)

    def _require_fits(self, grads: Sequence[Tensor | None], there: Sequence[Tensor]) -> None:
        """See `GradientBucket`; all at once only if all were made elsewhere."""
        if self.is_whole and not self._moved:
            super()._require_fits(grads, there)
            if self._are_all_apart(there):
                return
        for place, grad in enumerate(grads):
            if grad is not None:
                self._require_fit(place, grad)

    def _are_all_apart(self, grads: Sequence[Tensor]) -> bool:
        """Return True if autograd made all of `grads` elsewhere, and what they are to be copied to
        is in its place.
        """
        originals = self._originals
        return (
            [*map(Tensor.data_ptr, originals)] == self._addresses
            and [*map(kind_of, originals)] == self._fits
            and [*map(Tensor.stride, originals)] == self._strides
            and not any(map(requires_grad_of, grads))
            and self._overlaps.are_apart(grads)
        )

    def _require_fit(self, place: int, grad: Tensor) -> None:
        """See `GradientBucket`; one that has moved in must be untouched since then.

        The original is made anew before, where that is needed.
        """
        original = self._ensure_original(place)
        moved = self._moved.get(place)
        if moved is None:
            self._require_movable(place, grad, original)
        elif grad is not original or grad._version != moved:  # noqa: SLF001
            raise UsageError(CHANGED.format(name=self.names[place]))

    def pack(self, scale: float) -> None:
        """See `GradientBucket.pack`; leaves out what has moved in."""
        if self._torch_packing is None:
            super().pack(scale)
            return
        self._require_unchanged()
        self._scale = scale
        if self._gaps is not None:
            self._clear_gaps(self._gaps)
        if self.moves_in:
            for place, grad in enumerate(self._grads):
                if place not in self._moved:
                    self._torch_packing.pack_one(place, grad, scale)
                elif scale != self._moved_scale:
                    self.layout.tensor(self.wire, place).mul_(scale / self._moved_scale)
        else:
            self._torch_packing.move_at_once(
                self._grads, [*map(is_, self._grads, self._originals)], scale
            )
        self._torch_packing.seal(self._grads, self._word)
        if self.riders is not None and (self.riders.is_loaded or self.riders.digest is not None):
            self.riders.write()

    # gradients live on the wire, so nothing is elsewhere
    def unpack(self, parts: Parts = NO_PARTS) -> None:
        """Compare the headers; gradients are where they belong."""
        self._packing.compare(self._word)
        self._settle()

    def finish_replay(self, launches: Repeatable) -> None:
        """See `GradientBucket.finish_replay`."""
        self._settle()

    def _settle(self) -> None:
        """Compare the headers, and let every gradient end on the wire, times `factor`; those that
        lie elsewhere are replaced by `assign_missing`.
        """
        if self._packing.mismatched:
            self._refuse_sum()
        if not self.is_whole:
            self._make_missing()
        self._made |= {
            place: original
            for place, (grad, original) in enumerate(zip(self._grads, self._originals, strict=True))
            if grad is not None and grad is not original
        }
        if self.factor != 1:
            self.wire[self.head_numel :].mul_(self.factor)

    def _memory_for(self, place: int) -> Tensor:
        return self._ensure_original(place)

    def release(self) -> None:
        """See `GradientBucket.release`; graphs that saved earlier gradients now refuse to be
        differentiated.
        """
        super().release()
        increment_version(self._originals)
        self._moved = {}
