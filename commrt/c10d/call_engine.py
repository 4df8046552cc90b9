# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives of one process group, in order, by the plans of `commrt.c10d.call_plans`.

One call runs at a time: on the communication thread, or on that of a caller who waits for it. It
writes to the caller's rows (`Call.take`), and to the wire; for a while it points receives of a plan
to these rows. For a call with a timeout of its own, it changes that of the world's transport, and
then gives it the group's again.
"""

from __future__ import annotations

from functools import partial

import torch

from commrt.c10d.call import Call
from commrt.c10d.call_plans import CallPlanner, Part, Plan
from commrt.errors import DeadlineExceeded, TransportClosed, TransportError
from commrt.pricing.selection import Selection
from commrt.runtime.prepared import Prepared
from commrt.runtime.world import World
from commrt.store.reports import NUMBERED
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, Fact, Recorder, within_range
from commrt.transport.protocol import Tag, point

SPREAD = 0x9E3779B1
"""Makes sequence numbers differ in many bits, so that a call of one number is taken for no call of
another.
"""


class CallEngine:
    """The collectives of one group: any thread may `begin` one; for the rest see the module."""

    def __init__(self, world: World, selection: Selection, name: str) -> None:
        self._world = world
        self._name = name
        self.timeout_s = world.timeout_s
        """Of calls that have none of their own. Set by the group, on any thread."""
        self.begun = 0
        """Calls that have run, or begun to: the sequence number of the next one.

        Only a call that begins to run changes it; any thread may read it.
        """
        self._plans = Prepared[Plan](world)
        self._planner = CallPlanner(world, selection)

    def begin(
        self, call: Call, timeout_s: float | None = None, *, waits: bool = False
    ) -> Future[None] | None:
        """Run `call` after all earlier ones; return at once, or if the caller `waits` anyway None,
        when it is done.
        """
        device = call.kind.device
        comm_thread = self._world.comm_thread
        if device.type == "cuda":
            self._world.connect(device)
            waits = False
        task = partial(self._run, call, timeout_s)
        return comm_thread.call(task) if waits else comm_thread.submit(task)

    def _run(self, call: Call, timeout_s: float | None) -> None:
        number = self.begun
        transport = self._world.transport
        self.begun += 1
        if timeout_s is not None:
            transport.timeout_s = timeout_s
        try:
            # The caller's tensors may be made under it. torch.inference_mode() takes four times as
            # long.
            with torch._C._InferenceMode(True):  # noqa: SLF001
                plan = self._plans.known(call.kind)
                if plan is None:
                    plan = self._plans.keep(self._planner.plan(call.kind), call.kind)
                collective = call.kind.collective
                tag = Tag(number, collective, plan.number ^ (number * SPREAD & 0xFFFFFFFF))
                recorder = self._world.comm_thread.listener
                facts: dict[str, Fact] = {"numel": plan.numel, "schedule": plan.schedule}
                with (
                    NOTHING
                    if recorder is None
                    else within_range(recorder, collective, step=number, **facts)
                ):
                    for part in plan.parts:
                        _carry(part, call, tag, recorder)
                    for target, row in call.copies:
                        target.copy_(row.view(target.dtype).view(target.shape))
            if call.kind.device.type == "cuda":
                for row in (*call.put, *call.take):  # they may be freed on another stream
                    row.record_stream(torch.cuda.current_stream(row.device))
        except TransportError as error:
            self._name_call(error, call, number)
            raise
        finally:
            if timeout_s is not None:
                transport.timeout_s = self.timeout_s

    def _name_call(self, error: TransportError, call: Call, number: int) -> None:
        """Let an error say of which call it is, its timeout, and why the world was closed."""
        what = f"{call.kind}, sequence number {number} of group {self._name}"
        error.call = f"{call.kind.collective}()", f"{NUMBERED} {number}"
        if isinstance(error, DeadlineExceeded):
            what += f", with a timeout of {self._world.timeout_s:g} s"
        what += f": {error.what}"
        ended = self._world.comm_thread.failure if isinstance(error, TransportClosed) else None
        if isinstance(ended, TransportClosed):
            what += f", as {ended.what}"
        error.what = what


def _carry(part: Part, call: Call, tag: Tag, recorder: Recorder | None) -> None:
    """Write this rank's contribution to the wire, run the schedule, and read the result."""
    for wire, row, elements in part.put:
        wire.copy_(call.put[row][elements])
        if call.factor is not None:
            wire.mul_(call.factor)
    for target, copy in part.land:
        point(target, call.take[copy.row][copy.elements])
    try:
        part.program.run(tag, recorder)
    finally:
        for target, copy in part.land:
            point(target, copy.wire)
    for wire, row, elements in part.take:
        if (divisor := call.kind.divisor) > 1:
            is_exact = wire.is_floating_point() or wire.is_complex()
            # of the device, as a GPU multiplies by the reciprocal of a number of the host
            number = torch.full((), divisor, device=wire.device)
            wire.div_(number, rounding_mode=None if is_exact else "trunc")
        call.take[row][elements].copy_(wire)
