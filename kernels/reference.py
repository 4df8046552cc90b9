# SPDX-License-Identifier: Apache-2.0
"""The kernels in plain torch: pack, unpack, reduce, mix and norm. This defines them, and runs on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "combine_into",
    "in_pieces",
    "mix",
    "mix_into",
    "norm_of",
    "pack",
    "pack_at_once",
    "reduce_into",
    "unpack",
]

PIECE_NUMEL = 1 << 16
"""2 ** 15 to 2 ** 17 elements are equally fast; whole tensors of 1.6 million elements take 6 times as long."""


def pack(
    sources: Sequence[Tensor | None],
    targets: Sequence[Tensor],
    scale: float,
    nonfinite: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Write ``cast(source * scale)`` to the target of each pair, zeros for None.

    Values are scaled in fp32 (fp64 for fp64) and then cast: casting first loses more (mean relative error 0.00187
    against 0.00141 at six ranks), and overflows fp16 where the scaled value would not. `nonfinite` [1] is set to 1 if a
    scaled value is not finite before the cast. `sums` [pairs] gets the sums of squares of the scaled values: 0 for None
    and for empty tensors, NaN for others if `scale` itself is not finite.
    """
    for source, target in zip(sources, targets, strict=True):
        if source is None:
            target.zero_()
        else:  # torch rounds a product of these once, to the dtype of `target`
            is_exact = source.dtype in {target.dtype, torch.float32, torch.float64}
            torch.mul(source if is_exact else source.float(), scale, out=target)
    if sums is not None:
        _square_sums(sources, scale, scale, sums)
    if nonfinite is not None and not all(_is_finite(one, scale) for one in sources):
        nonfinite.fill_(1)


def pack_at_once(sources: Sequence[Tensor | None], targets: Sequence[Tensor], row: Tensor, scale: float) -> None:
    """Do what `pack` does for targets in one `row`, of the sources' dtype: copy all, then scale the row.

    Per tensor it saves a call: 0.5 in place of 2.8 us at 1,024 elements, 2.9 for 4.3 at 16,384. Tensors that do not fit
    a core's cache are read and written twice: 20 for 17 us at 65,536.
    """
    present: list[Tensor] = []
    places: list[Tensor] = []
    for source, target in zip(sources, targets, strict=True):
        if source is None:
            target.zero_()
        else:
            present.append(source)
            places.append(target)
    if present:
        torch._foreach_copy_(places, present)
        row.mul_(scale)


def _square_sums(tensors: Sequence[Tensor | None], factor: float, scale: float, sums: Tensor) -> None:
    """Write the sum of squares of each tensor times `factor` to its place in `sums`, 0 for None.

    The sum is NaN if `scale`, by which the tensors were or will be multiplied, is not finite.
    """
    for i, tensor in enumerate(tensors):
        if tensor is None or tensor.numel() == 0:
            sums[i] = 0.0
        else:
            parts = [_square_sum(piece, factor, sums.dtype) for (piece,) in in_pieces([tensor])]
            sums[i] = sum(parts[1:], parts[0]) + 0.0 * scale


def _square_sum(piece: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    if factor == 1.0:
        return piece.to(dtype).square().sum()
    return _scaled(piece, factor).to(dtype).square_().sum()


def _is_finite(source: Tensor | None, scale: float) -> bool:
    return source is None or all(bool(_scaled(piece, scale).isfinite().all()) for (piece,) in in_pieces([source]))


def _scaled(source: Tensor, scale: float) -> Tensor:
    return source.to(torch.promote_types(source.dtype, torch.float32)) * scale


def unpack(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor | None],
    scale: float = 1.0,
    *,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """Write ``cast(source * scale)``, or ``cast(target + source * scale)``, to the target of each pair except None.

    Computed in fp32 (fp64 for fp64) and rounded once. `sums` [pairs] gets the sums of squares of what is stored, before
    the cast, as in `pack`.
    """
    if scale == 1.0 and not accumulate and sums is None:
        present, values_of_present = [], []
        for target, source in zip(targets, sources, strict=True):
            if target is not None:
                present.append(target)
                values_of_present.append(source)
        if present:
            torch._foreach_copy_(present, values_of_present)
        return
    values = [
        None if target is None else _unpacked(source, target, scale, accumulate)
        for source, target in zip(sources, targets, strict=True)
    ]
    for target, value in zip(targets, values, strict=True):
        if target is not None and value is not None:
            target.copy_(value)
    if sums is not None:
        _square_sums(values, 1.0, scale, sums)


def _unpacked(source: Tensor, target: Tensor, scale: float, accumulate: bool) -> Tensor:
    if scale == 1.0 and not accumulate:
        return source
    value = source.to(torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)) * scale
    return value + target if accumulate else value


def reduce_into(out: Tensor, received: Sequence[Tensor]) -> None:
    """Compute ``out = cast(out + received[0] + received[1] + ...)``, from left to right, rounded once.

    Floats are added in fp32; fp64, integers and complex numbers in their own dtype. All tensors have the same dtype and
    shape, and share no memory.
    """
    if len(received) == 1:
        out.add_(received[0])  # torch adds two 16-bit floats in fp32 and rounds once
        return
    wide = torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype
    for piece, *parts in in_pieces([out, *received]):
        total = piece.to(wide)
        for part in parts:
            total.add_(part)
        if total is not piece:
            piece.copy_(total)


def combine_into(function: Callable[..., Tensor], out: Tensor, received: Sequence[Tensor]) -> None:
    """Compute ``out = function(function(out, received[0]), received[1]) ...`` for a `function` that takes ``out=``."""
    for own, *others in in_pieces([out, *received]):
        for other in others:
            function(own, other, out=own)


def mix(
    tensors: Sequence[Tensor | None], received: Sequence[Tensor], sent: Sequence[Tensor] | None, weight: float
) -> None:
    """Compute ``own += weight * (received - sent)`` for each of `tensors` except None.

    `received` and `sent` are the values on the wire. What one rank gains its peer loses, even where the wire rounds, so
    the mean over ranks stays the same. With None for `sent`, each tensor's own value takes its place.
    """
    for i, own in enumerate(tensors):
        if own is not None:
            mix_into(own, received[i], weight, None if sent is None else sent[i])


def mix_into(own: Tensor, received: Tensor, weight: float, sent: Tensor | None = None) -> None:
    """Compute ``own = cast(own + weight * (received - sent))`` in fp32 (fp64 for fp64): 16-bit sums cannot overflow."""
    wide = torch.promote_types(own.dtype, torch.float32)
    for piece, came, went in in_pieces([own, received, own if sent is None else sent]):
        moved = torch.sub(came.to(wide), went.to(wide)).mul_(weight)
        if own.dtype == wide:
            piece.add_(moved)
        else:
            piece.copy_(moved.add_(piece))


def norm_of(sums: Tensor) -> Tensor:
    """Return ``sqrt(sums[0] + sums[1] + ...)``, a scalar: added in fp64 in one order, rounded to fp32 once."""
    return sums.sum(dtype=torch.float64).sqrt().float()


def in_pieces(tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Return views that together cover `tensors`, all of one shape, cut alike into pieces that fit a core's cache.

    Tensors on a GPU are not cut.

    >>> [own.shape for own, _ in in_pieces([torch.zeros(300, 500), torch.ones(300, 500)])]
    [torch.Size([131, 500]), torch.Size([131, 500]), torch.Size([38, 500])]
    """
    first = tensors[0]
    if first.numel() <= PIECE_NUMEL or first.device.type != "cpu":
        return [tuple(tensors)]
    rows = max(PIECE_NUMEL * len(first) // first.numel(), 1)
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
