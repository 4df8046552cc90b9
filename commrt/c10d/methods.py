# SPDX-License-Identifier: Apache-2.0
"""The methods that torch.distributed calls on a process group, by c10d's names.

They run on the thread that calls, check, and hand the work to the group; they keep nothing. Those
that `collective` marks are seen there by torch's profiler and dispatch modes. The ranges of the
communication thread come from `commrt.threads.recording`. Without a profiler nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

from commrt.c10d.call import Call
from commrt.c10d.call_options import kept_seconds_of, option, seconds_of
from commrt.c10d.dist_errors import as_dist_error
from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.group_work import GroupWork
from commrt.c10d.name import NAME
from commrt.c10d.rows import memory_of
from commrt.c10d.short_forms import FORMS, OPTIONS, long_form
from commrt.c10d.sparse import sparse_all_reduce
from commrt.errors import CommrtError, DeadlineExceeded, UsageError
from commrt.runtime.untraced import untraced

Method = TypeVar("Method", bound=Callable[..., Any])

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # of the calling thread


def collective(name: str, torch_name: str = "") -> Callable[[Method], Method]:
    """Make a method one that torch calls. `torch_name` is c10d's, if the method has another.

    The method gets its arguments in the long form (`long_form`). All errors of commrt become
    torch's, too. While there is a profiler or a dispatch mode, the call goes to
    ``self.observed(torch_name, args, begin)``, of which ``begin()`` is the call.
    """

    def decorated(method: Method) -> Method:
        has_forms = method.__name__ in FORMS

        @wraps(method)
        def begin(*args: Any, **options: Any) -> Any:
            try:
                if has_forms and (options or args[-1].__class__ not in OPTIONS):
                    args = (args[0], *long_form(method.__name__, args[1:], options))
                    options = {}
                if not (profiler._is_profiler_enabled or _modes()):  # noqa: SLF001  # a flag of the process
                    return method(*args, **options)
                group, *given = [*args, *options.values()]

                def call() -> Any:
                    with _RecordFunctionFast(f"{NAME}::{name}", _inputs(given)):
                        return method(*args, **options)

                return group.observed(torch_name or method.__name__, given, call)
            except CommrtError as error:
                raise as_dist_error(error) from error.__cause__

        return cast("Method", begin)

    return decorated


def _inputs(given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a call reads: of the second argument, or else of the first."""
    for each in given[1::-1]:
        tensors = [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)]
        if tensors:
            return tensors
    return []


@untraced
class Methods:
    """c10d's collectives on a `ProcessGroupWorld`, in all forms that torch's own groups take.

    Raises `UsageError` for what cannot work, before anything is sent. Works raise the other errors.
    All errors are also ``torch.distributed.DistBackendError``.
    """

    group: ProcessGroupWorld
    """Set or defined by the class that inherits from this one."""

    def observed(self, name: str, given: Sequence[Any], begin: Callable[[], Any]) -> Any:
        """Return ``begin()``, torch's method `name` with `given`, which torch 2.14 has seen."""
        return begin()

    @collective("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' tensors at every rank."""
        tensor = _one(tensors)
        if tensor.is_sparse:
            return sparse_all_reduce(tensor, opts, self.group.requests.size, self.allgather)
        return self._begin(opts, self.group.requests.whole("all_reduce", tensor, opts))

    @collective("all_reduce")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Do `allreduce` of several tensors; one that is given twice is combined once."""
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        calls = [self.group.requests.whole("all_reduce", tensor, opts) for tensor in distinct]
        return self._begin(opts, *calls, result=tensors)

    @collective("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        return self._begin(opts, self.group.requests.whole("broadcast", _one(tensors), opts))

    @collective("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' tensors at the root."""
        return self._begin(opts, self.group.requests.whole("reduce", _one(tensors), opts))

    @collective("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to all ranks."""
        return self._begin_pieces("all_gather", [_one(inputs)], [_listed(outputs)], opts)

    @collective("all_gather")
    def allgather_coalesced(
        self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `allgather` of several tensors; ``outputs[rank][i]`` is for input i of that rank."""
        return self._begin_pieces("all_gather", inputs, [*zip(*outputs, strict=True)], opts)

    @collective("all_gather", "_allgather_base")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to all ranks, into one tensor."""
        return self._begin_pieces("all_gather", [tensor], [output], opts)

    @collective("all_gather", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Do `all_gather_single` of several tensors."""
        return self._begin_pieces("all_gather", inputs, outputs, opts)

    @collective("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to the root."""
        return self._begin_pieces("gather", [_one(inputs)], [_listed(outputs)], opts)

    @collective("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensors to one rank each."""
        return self._begin_pieces("scatter", [_one(outputs)], [_listed(inputs)], opts)

    @collective("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' inputs of a rank's number at that rank."""
        return self._begin_pieces("reduce_scatter", [_one(outputs)], [_listed(inputs)], opts)

    @collective("reduce_scatter", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Combine all ranks' parts of a tensor at one rank each."""
        return self._begin_pieces("reduce_scatter", [output], [tensor], opts)

    @collective("reduce_scatter", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` of several tensors."""
        return self._begin_pieces("reduce_scatter", outputs, inputs, opts)

    @collective("all_to_all")
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy the input of each rank's number to that rank."""
        return self._begin(opts, self.group.requests.all_to_all(outputs, inputs))

    @collective("all_to_all", "alltoall_base")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Copy the part of each rank's number to that rank; no sizes stand for equal parts."""
        return self._begin(
            opts, self.group.requests.all_to_all_single(output, tensor, output_sizes, input_sizes)
        )

    @collective("barrier")
    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._begin(opts, self.group.requests.barrier())

    @collective("barrier")
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those missing, whatever `wait_all_ranks` says."""
        opts = dist.BarrierOptions()
        given = timeout if isinstance(timeout, timedelta | None) else timeout.timeout
        if given is not None and given >= timedelta(0):
            # 0 would stand for the group's own
            opts.timeout = max(given, timedelta(milliseconds=1))
        try:
            self._begin(opts, self.group.requests.barrier()).wait()
        except DeadlineExceeded as late:
            late.what = (
                f"Rank {self.group.requests.rank} timed out in monitoredBarrier: {late.what}"
            )
            raise

    @collective("send")
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803  # torch's name
        """Send a tensor to `dstRank`; tags, below 2^31 - 1, are for CPU tensors only."""
        return self._post(tensors, dstRank, tag, is_send=True)

    @collective("recv")
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803  # torch's name
        """Receive a tensor from `srcRank`."""
        return self._post(tensors, srcRank, tag, is_send=False)

    @collective("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive a CPU tensor from any rank, which the work then names."""
        return self._post(tensors, None, tag, is_send=False)

    def start_coalescing(self, *_: Any) -> None:
        """Begin a block whose collectives torch waits for as one; they run in order anyway."""

    def end_coalescing(self, *_: Any) -> dist.Work:
        """Return a work that is complete when all earlier collectives are."""
        self.group.device_messages.flush()
        return GroupWork(self.group.world.comm_thread.submit(lambda: None), [])

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of all later collectives."""
        self.group.set_timeout(kept_seconds_of(timeout))

    def _get_sequence_number_for_group(self) -> int:
        return self.group.engine.begun

    def shutdown(self) -> None:
        """Finish what was started, then close; ``destroy_process_group`` calls it."""
        self.group.close()

    def abort(self) -> None:
        """End all collectives that are in flight with an error, then close all connections."""
        self.group.abort()
        self.group.close()

    def _post(self, tensors: Any, peer: int | None, tag: int, *, is_send: bool) -> dist.Work:
        plain = memory_of(_one(tensors))
        if not plain.is_contiguous():
            raise UsageError(
                f"a tensor of shape {tuple(plain.shape)} has gaps: pass its contiguous() copy"
            )
        if plain.device.type == "cpu":
            return self.group.host_messages.post(plain, peer, tag, is_send=is_send)
        return self.group.device_messages.post(plain, peer, is_send=is_send)

    def _begin_pieces(
        self, name: str, own: Sequence[Tensor], pieces: Sequence[Any], opts: Any
    ) -> dist.Work:
        pairs = zip(own, pieces, strict=True)
        return self._begin(opts, *[self.group.requests.pieces(name, *pair, opts) for pair in pairs])

    def _begin(self, opts: Any, *calls: Call, result: Sequence[Tensor] | None = None) -> dist.Work:
        """Begin `calls`; they run in order, so the work is that of the last one.

        The work returns `result`, or what the calls return, one after the other.
        """
        if not calls:
            raise UsageError("no tensors were given: give at least one")
        timeout_s = seconds_of(option(opts, "timeout", None))
        if self.group.device_messages.waiting:
            self.group.device_messages.flush()
        waits = opts is not None and not opts.asyncOp
        results = list[Tensor]()
        for call in calls:
            future = self.group.engine.begin(call, timeout_s, waits=waits)
            results += call.result
        return GroupWork(future, results if result is None else result, call.kind)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing


def _one(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(
            f"{len(tensors)} tensors in one call: give one, as a process has one device"
        )
    return cast("Tensor", tensors[0])


def _listed(tensors: Any) -> list[Tensor]:
    if not tensors or isinstance(tensors[0], Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise UsageError(
            f"{len(tensors)} lists of tensors in one call: give one, as a process has one device"
        )
    return list(tensors[0])
