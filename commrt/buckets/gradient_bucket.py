# SPDX-License-Identifier: Apache-2.0
"""A bucket of gradients, which travel together in one buffer, from ``param.grad`` and back.

It sends nothing itself; `GradientBucket` says which thread calls what, and what it writes. A wire
buffer begins with a header and one flag per gradient: 1 if this rank had it, 0 if it sent
zeros instead. Then come the gradients, in the dtype that travels. Header and flags are summed with
the rest. Each bit of the header travels with its opposite. So each rank sees afterwards whether all
sent the same bucket of the same step, and which gradients somebody had.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import compress, repeat
from operator import add, attrgetter, is_
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from commrt.buckets.dtypes import gradient_dtype
from commrt.buckets.header import BITS, EXPLANATIONS, WEIGHED_AT, Header, encode, explain_mismatch
from commrt.buckets.overlap_check import OverlapCheck
from commrt.buckets.riders import Leaving, Riders
from commrt.buckets.tensor_kind import TensorKind, bucket_description
from commrt.buckets.tensors import Named
from commrt.buckets.weight_watch import WeightWatch
from commrt.buckets.weights_that_ride import total_weight
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.dispatch import packing, repeatable
from commrt.kernels.layout import Layout
from commrt.kernels.packing import NO_PARTS, Parts, Repeatable
from commrt.kernels.plain_torch import scale_present
from commrt.kernels.torch_packing import bits
from commrt.runtime.wire import QuantizedWire

CHANGED = (
    "the gradient of {name} was changed, replaced or removed while it was being averaged: change"
    " gradients, and step or zero them, only after backward() has returned (hooks that change them:"
    " register these before attach())"
)
SPARSE = "the gradient of {name} is {layout}: only dense gradients can be averaged"
FP16_FACTOR = 1 / 16
"""A sum in fp16 that a factor outside of this range corrects is made anew."""
grad_of = attrgetter("grad")
kind_of = attrgetter("layout", "dtype", "shape", "device")
version_of = attrgetter("_version")
"""How often a tensor was written to; views count together with what they are views of."""


class GradientBucket:
    """Parameters whose gradients travel together in the buffer `wire`.

    The bucket has one thread at a time, so its fields need no lock. In each step:

    1. The thread that trains calls `take`, or that of its backward pass.
    2. The communication thread, or the one that trains in its place, calls `pack`, `weigh` and
       `unpack`; or a device graph does their work between `prepare_replay` and `finish_replay`.
    3. When that is done, the thread that trains, or that of its backward pass, calls
       `assign_missing`. Local SGD, whose gradients are no ``param.grad`` of the model, calls
       `unpack` and `release` there instead.

    Nobody else may touch the gradients from the first to the last, or a later one of these calls
    raises `UsageError`. Backup workers that lose a rank make new buckets, and `take` again, on the
    communication thread; a step that they drop ends by `release`.

    What it writes of others: gradients, ``param.grad``, its riders, and the overlap check that all
    buckets of a model share. `ViewBucket`, the only subclass, uses private parts, as it says.
    """

    unpacks_wire = True
    """False if gradients stay on the wire."""

    _sent: Header
    """What `take` has let the latest gradients be sent with."""

    def __init__(
        self,
        index: int,
        params: Sequence[Named],
        layout: Layout,
        wire: Tensor,
        model: int,
        overlaps: OverlapCheck | None = None,
        quantized: QuantizedWire | None = None,
    ) -> None:
        self.index = index
        self._use_params(params, wire.device)
        self._use_wire(wire, layout, model)
        self._use_quantizer(quantized)
        self._overlaps = OverlapCheck() if overlaps is None else overlaps
        self._overlaps.expect_bucket()
        self.own_settings: Callable[[], str] = str
        """Returns what this rank's settings are, for errors; `Request.build_buckets` sets it."""
        self.riders: Riders | None = None
        """What rides with this bucket; set once, by `carry_riders`, as is `watch`."""
        self.watch: WeightWatch | None = None
        """Compares digests of weights among the riders."""
        self.may_weigh_nothing = False
        """All ranks together may weigh nothing, as they then send zeros only; local SGD sets it
        before the first step.
        """
        self._begin()

    def _use_params(self, params: Sequence[Named], device: torch.device) -> None:
        """Note which gradients travel, in wire order, and what each must be."""
        self.params = params
        self.names = tuple(name for name, _ in params)  # in wire order
        self._tensors = [param for _, param in params]
        self._like = [
            torch.empty_like(param, dtype=gradient_dtype(param), device="meta")
            for _, param in params
        ]
        self._kinds = [TensorKind.of(like) for like in self._like]
        self._fits = [(torch.strided, kind.dtype, kind.shape, device) for kind in self._kinds]
        self._strides = [kind.strides for kind in self._kinds]
        self._nbytes = [like.nbytes for like in self._like]

    def _use_wire(self, wire: Tensor, layout: Layout, model: int) -> None:
        """Let the gradients travel in `wire`: what lies where, and what packs them."""
        self.layout = layout
        self.wire = wire
        """What travels; programs that are bound to it write sums there."""
        self.header = Header(0, model, 0, 0, self.index, 0)
        """What its wire says in every step; the first bucket's says more."""
        self.head_numel = layout.head_numel
        self._packing = packing(wire, layout, self._like)
        self.repeatable = repeatable(self._packing)
        """Launches that a device graph can hold; None where plain torch packs, as on a CPU. Those
        who bind and capture load its kernels.
        """

    def _use_quantizer(self, quantized: QuantizedWire | None) -> None:
        """Let values become few bits when they travel; None sends them as they are on the wire."""
        self.quantized = quantized
        """What gradients become when they travel; None if they travel as they are on the wire."""
        feeds_back = quantized is not None and quantized.feedback
        self.residual = torch.zeros_like(self.wire[self.head_numel :]) if feeds_back else None
        """What rounding lost, behind the head, for the next step; None without feedback. Quantized
        programs write it, and before `pack` whoever goes on from another one: of a checkpoint, of
        buckets before, or of an exchange of local SGD that is done again.
        """
        gaps = (
            [] if quantized is None else [place - self.head_numel for place in self.layout.gaps()]
        )
        self._gaps = torch.tensor(gaps, device=self.wire.device) if gaps else None

    def _begin(self) -> None:
        """Set what each step sets anew."""
        self._scale = 1.0  # of the gradients on the wire
        self._word = 0  # the header that the wire must show after the reduction
        self.weight: float | None = None
        """What all gradients of the latest step weighed; None if none was weighed. `take` forgets
        it, and `weigh` writes it.
        """
        self.factor = 1.0
        """By what `unpack` multiplies the gradients, as weights ride with them. `take` sets it to
        1, and `weigh` writes it. The engine does where it packs anew, and in later buckets than the
        first, with whose riders weights came, if ranks mix.
        """
        self.own_weight = 1.0
        """What this rank's gradients weigh, if that is not in them yet. Local SGD sets it between
        `take` and `pack`; the engine's own one says it for all buckets of other ways to train.
        """
        self._grads: list[Tensor | None] = []  # on their way
        self._made: dict[int, Tensor] = {}  # gradients that only other ranks had, by place
        self._counted: list[Tensor] = []  # those that were taken and whose writes are counted
        self._versions: list[int] = []  # how many these were when they were taken
        self._writes = 0  # by commrt since then
        self.is_whole = True
        """This rank has all gradients of the step; `take` says so."""

    def carry_riders(self, riders: Riders) -> None:
        """Let `riders` ride with this bucket from now on; before its first step."""
        self.riders = riders
        self.watch = WeightWatch(riders)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it keeps."""
        return self.wire.nbytes + (0 if self.residual is None else self.residual.nbytes)

    def description(self) -> str:
        """Return everything that must agree between ranks, as text."""
        return bucket_description(
            self.index, self.quantized or self.wire.dtype, self.names, self._kinds
        )

    def residuals(self) -> dict[str, Tensor]:
        """Return the views of `residual` that belong to each parameter, flat; empty without
        feedback.
        """
        if self.residual is None:
            return {}
        spans = zip(self.layout.offsets, self.layout.counts, strict=True)
        parts = (self.residual[place - self.head_numel :][:count] for place, count in spans)
        return dict(zip(self.names, parts, strict=True))

    def take(self, header: Header, ready: Container[str], leaving: Leaving | None = None) -> None:
        """Hold on to the gradients at hand, to be sent with `header`; in the first bucket `leaving`
        rides along.

        Raises `UsageError` for a gradient that does not fit, or that is `ready` and gone.
        """
        if self._packing.mismatched:  # a GPU may have found out since the previous step
            self._refuse_sum()
        if leaving is not None and self.riders is not None:
            self.riders.load(leaving)
            header = header._replace(weighed=leaving.weighed)
        self._sent = header
        self._word = encode(header)
        self._made = {}
        self._writes = 0
        self.factor = 1.0
        self.weight = None
        grads: list[Any] = [*map(grad_of, self._tensors)]
        self._grads = grads
        self.is_whole = True not in map(is_, grads, repeat(None))
        whole = grads, self.names, self._nbytes
        there, names, nbytes = whole if self.is_whole else self._present(grads, ready)
        self._require_fits(grads, there)
        self._counted = there
        if any(map(Tensor._is_view, there)):  # noqa: SLF001  # nothing else tells
            self._counted = [grad for grad in there if not grad._is_view()]  # noqa: SLF001
        self._versions = [*map(version_of, self._counted)]
        self._overlaps.check(
            self.index, [*zip(map(Tensor.data_ptr, there), nbytes, names, strict=True)]
        )

    def _present(
        self, grads: Sequence[Tensor | None], ready: Container[str]
    ) -> tuple[list[Tensor], Sequence[str], Sequence[int]]:
        """Return the gradients that are there, their names and their bytes."""
        for name, grad in zip(self.names, grads, strict=True):
            if grad is None and name in ready:
                raise UsageError(CHANGED.format(name=name))
        here = [grad is not None for grad in grads]
        there = cast("list[Tensor]", [*compress(grads, here)])
        return there, [*compress(self.names, here)], [*compress(self._nbytes, here)]

    def _require_fits(self, grads: Sequence[Tensor | None], there: Sequence[Tensor]) -> None:
        """Raise `UsageError` for one of the `grads` that would be written to its neighbours'
        places.

        They are compared all at once, which takes a third of the time, and named where some differ.
        """
        if not (
            self.is_whole
            and [*map(kind_of, there)] == self._fits
            and [*map(Tensor.stride, there)] == self._strides
            and not any(map(Tensor.is_inference, there))
        ):
            for place, grad in enumerate(grads):
                if grad is not None:
                    self._require_fit(place, grad)

    def take_alone(self, leaving: Leaving | None) -> None:
        """Do what `take` does on a rank without others, and refuse only sparse gradients."""
        if leaving is not None and self.riders is not None:
            self.riders.load(leaving)
        for (name, _), grad in zip(self.params, map(grad_of, self._tensors), strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise UsageError(SPARSE.format(name=name, layout=grad.layout))

    def pack(self, scale: float) -> None:
        """Write the gradients times `scale` to the wire, zeros for absent ones."""
        self._require_unchanged()
        self._scale = scale = scale * self.own_weight
        if self._gaps is not None:
            self._clear_gaps(self._gaps)
        self._packing.pack(self._grads, scale, self._word)
        if self.riders is not None and (self.riders.is_loaded or self.riders.digest is not None):
            self.riders.write()

    def weigh(self, scale: float) -> None:
        """Read what gradients weigh, and let `unpack` turn the sum of them into what that makes of
        it; they were packed with `scale`.
        """
        riders = self.riders
        self.factor = 1.0
        self.weight = None
        if riders is None or riders.leaving.unit is None:
            return
        if riders.knows_nothing:
            for bit in (WEIGHED_AT, BITS + WEIGHED_AT):  # this rank expects what the others say
                self._word |= int(self.layout.header(self.wire)[bit] != 0) << bit
        self.weight = total_weight(riders.read(), may_be_zero=self.may_weigh_nothing)
        if self.weight is not None:
            self.factor = riders.leaving.unit / (self.weight * scale)

    def matches(self) -> bool:
        """Return True if the wire shows the header that it must show."""
        return torch.equal(self.layout.header(self.wire).bool().cpu(), bits(self._word))

    def must_pack_anew(self) -> bool:
        """Return True if the sum left the range of fp16, or came near its ends, as the factor was
        not known before.

        The same on all ranks, as the factor and the sum are. On a GPU only the factor counts, as
        parts of the sum may lie elsewhere. Gradients that live on the wire are lost, as an overflow
        loses them.
        """
        if self.wire.dtype != torch.float16 or self.quantized is not None or not self.unpacks_wire:
            return False
        is_near = FP16_FACTOR <= self.factor <= 1 / FP16_FACTOR
        return not (is_near and (self.wire.is_cuda or bool(self.wire.isfinite().all())))

    def multiply(self, factor: float) -> None:
        """Multiply the gradients at hand, which have not travelled."""
        scale_present((param.grad for _, param in self.params), factor)
        self._writes += 1

    def _clear_gaps(self, gaps: Tensor) -> None:
        """Write zeros between gradients that will be quantized: what lies there would change scales
        of their blocks.
        """
        self.wire[self.head_numel :].index_fill_(0, gaps, 0.0)
        if self.residual is not None:
            self.residual.index_fill_(0, gaps, 0.0)

    def unpack(self, parts: Parts = NO_PARTS) -> None:
        """Write the wire, of which `parts` lie elsewhere, to the gradients; one that no rank had
        stays None.

        Raises `DisagreementError` if ranks sent different buckets: before it writes; on a GPU in
        the next step.
        """
        grads = self._grads if self.is_whole else self._make_missing()
        self._packing.unpack(grads, self._word, parts=parts)
        if self._packing.mismatched:
            self._refuse_sum()
        self._writes += 1
        if self.factor != 1:
            scale_present(grads, self.factor)
            self._writes += 1

    def prepare_replay(self, launches: Repeatable, scale: float) -> None:
        """Do what `pack` does, for `launches` that a device graph replays."""
        self._require_unchanged()
        launches.aim(self._grads, scale, self._word)

    def finish_replay(self, launches: Repeatable) -> None:
        """Do what the replayed `launches` left to `unpack`: gradients that only other ranks had."""
        launches.repeated(self._grads)
        if not self.is_whole:
            self._make_missing()
            self._packing.unpack([self._made.get(i) for i in range(len(self._grads))], self._word)
        if self._packing.mismatched:
            self._refuse_sum()
        self._writes += 1

    def assign_missing(self) -> None:
        """Give parameters the gradients that only other ranks had; `unpack` has written the others
        in place.
        """
        self._require_unchanged()
        if False in map(is_, map(grad_of, self._tensors), self._grads):
            for (name, param), grad in zip(self.params, self._grads, strict=True):
                if param.grad is not grad:
                    raise UsageError(CHANGED.format(name=name))
        for i, made in self._made.items():
            # made on the communication thread's stream, used and freed on this one
            if made.is_cuda:
                made.record_stream(torch.cuda.current_stream(made.device))
            self._tensors[i].grad = made
        self.release()

    def release(self) -> None:
        """Let go of the gradients, which would otherwise live until the next step."""
        self._grads = []
        self._made = {}
        self._counted = []
        self._versions = []

    def _require_fit(self, place: int, grad: Tensor) -> None:
        """Raise `UsageError` for a gradient that would be written to its neighbours' places."""
        name = self.names[place]
        kind = self._kinds[place]
        if grad.layout is not torch.strided:
            raise UsageError(SPARSE.format(name=name, layout=grad.layout))
        if grad.is_inference():
            raise UsageError(
                f"the gradient of {name} was made under torch.inference_mode(): use torch.no_grad()"
                " there"
            )
        if grad.device != (ours := self.wire.device):
            raise UsageError(
                f"the gradient of {name} is on {grad.device}, and its bucket on {ours}: move it"
                " there"
            )
        if (grad.dtype, grad.shape, grad.stride()) != kind:
            _refuse_kind(name, TensorKind.of(grad), kind)

    def _make_missing(self) -> list[Tensor | None]:
        """Make memory for gradients that only other ranks had, and return it with the others; keep
        what was sent for one that no rank had as a residual. On a GPU this waits for the wire.
        """
        present = self._packing.present()
        missing = [i for i, grad in enumerate(self._grads) if grad is None]
        self._made = {i: self._memory_for(i) for i in missing if present[i]}
        residuals = self.residuals()
        # nobody will use what ranks have sent for it
        for i in (i for i in missing if residuals and not present[i]):
            # of a block that was not finite: nothing
            sent = self.layout.tensor(self.wire, i).nan_to_num(0.0, 0.0, 0.0)
            residuals[self.names[i]].add_(sent, alpha=self._scale)
        return [self._made.get(i, grad) for i, grad in enumerate(self._grads)]

    def _memory_for(self, place: int) -> Tensor:
        return torch.empty_like(self._like[place], device=self.wire.device)

    def _refuse_sum(self) -> NoReturn:
        why = explain_mismatch(self.layout.header(self.wire), self._sent)
        if why.startswith(EXPLANATIONS["settings"]) and (settings := self.own_settings()):
            why += f". This rank has {settings}"
        step = "" if self.index else f" of step {self._sent.step}"
        raise DisagreementError(f"bucket {self.index}{step} was summed with something else: {why}")

    def _require_unchanged(self) -> None:
        """Raise `UsageError` if somebody else has written to the gradients since `take`."""
        now = [*map(version_of, self._counted)]
        if now != [*map(add, self._versions, repeat(self._writes))]:
            name_of = {id(grad): name for name, grad in zip(self.names, self._grads, strict=True)}
            for grad, before, after in zip(self._counted, self._versions, now, strict=True):
                if after != before + self._writes:
                    raise UsageError(CHANGED.format(name=name_of[id(grad)]))


def _refuse_kind(name: str, own: TensorKind, kind: TensorKind) -> None:
    """Raise `UsageError` unless a gradient of kind `own` lies in memory like one of `kind`."""
    if own[:2] != kind[:2]:
        raise UsageError(
            f"the gradient of {name} is {own}, but was {kind} when the model was attached: "
            "detach() and attach() again after changing parameters"
        )
    if not own.lies_like(kind.strides):
        raise UsageError(
            f"the gradient of {name} lies in memory with strides {own.strides}, and autograd makes"
            f" it with {kind.strides}: give it that layout, by torch.empty_like(param).copy_(grad)"
        )
