# SPDX-License-Identifier: Apache-2.0
"""The methods that torch.distributed calls on a process group, by c10d's names. All return a `Work`.

torch's profiler and dispatch modes see them on the thread that calls. The ranges of the communication thread come from
`commrt.runtime.recording`. Without a profiler nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from commrt.c10d.call import Call
from commrt.c10d.checked_calls import CheckedCalls, memory_of
from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.group_work import GroupWork, as_dist_error, seconds_of
from commrt.errors import CommrtError, DeadlineExceeded, UsageError
from commrt.torch_import import NAME, untraced

__all__ = ["NAME", "Methods"]

SHORTEST_S = 0.001
"""The timeout of a barrier for which 0 is given."""
P = ParamSpec("P")
R = TypeVar("R")

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # of the calling thread


def observable(name: str, torch_name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a profiler and dispatch modes see the calls of a method. `torch_name` is c10d's, if the method has another.

    While there are such, the call goes to ``self.observed(torch_name, args, begin)``, of which ``begin()`` is the call.
    """

    def decorated(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def begin(*args: P.args, **options: P.kwargs) -> R:
            if not (profiler._is_profiler_enabled or _modes()):  # noqa: SLF001  # a flag of the process
                return method(*args, **options)
            group, *given = list(args) + list(options.values())

            def call() -> R:
                with _RecordFunctionFast(f"commrt::{name}", _inputs(given)):
                    return method(*args, **options)

            return cast("R", cast("Any", group).observed(torch_name or method.__name__, given, call))

        return begin

    return decorated


def _inputs(given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a call reads: by c10d's order the second argument, or the first if that has none."""
    found = [_tensors(each) for each in given[:2]]
    return (found[1:] and found[1]) or found[0] if found else []


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [one for each in given for one in _tensors(each)] if isinstance(given, list | tuple) else []


@untraced
class Methods:
    """c10d's collectives on a `ProcessGroupWorld`. Each takes options of torch.distributed, or their defaults.

    Raises `UsageError` for what cannot work, before anything is sent. Works raise the other errors. All errors are also
    ``torch.distributed.DistBackendError``.
    """

    group: ProcessGroupWorld
    requests: CheckedCalls

    def observed(self, name: str, given: Sequence[Any], begin: Callable[[], Any]) -> Any:
        """Return ``begin()``, the call of torch's method `name` with the arguments `given`: torch 2.14 has seen it."""
        del name, given
        return begin()

    @observable("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' tensors at every rank."""
        tensor = _one(tensors)
        if tensor.is_sparse:
            return self._guarded(lambda: _sparse_all_reduce(tensor, _op(opts), self.requests.size, self.allgather))
        return self._begin(opts, self.requests.all_reduce, tensor, _op(opts))

    @observable("all_reduce")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Do `allreduce` of several tensors."""
        return self._begin_all(opts, self.requests.all_reduce, [(tensor, _op(opts)) for tensor in tensors])

    @observable("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        return self._begin(opts, self.requests.broadcast, _one(tensors), _root(opts))

    @observable("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' tensors at the root."""
        return self._begin(opts, self.requests.reduce, _one(tensors), _op(opts), _root(opts))

    @observable("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to all ranks."""
        return self._begin(opts, self.requests.all_gather, _listed(outputs), _one(inputs))

    @observable("all_gather")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `allgather` of several tensors; ``outputs[rank][i]`` is for input i of that rank."""
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._begin_all(opts, self.requests.all_gather, pairs)

    @observable("all_gather", "_allgather_base")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to all ranks, into one tensor."""
        return self._begin(opts, self.requests.all_gather, output, tensor)

    @observable("all_gather", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `all_gather_single` of several tensors."""
        return self._begin_all(opts, self.requests.all_gather, zip(outputs, inputs, strict=True))

    @observable("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to the root."""
        return self._begin(opts, self.requests.gather, _listed(outputs), _one(inputs), _root(opts))

    @observable("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensors to one rank each."""
        return self._begin(opts, self.requests.scatter, _one(outputs), _listed(inputs), _root(opts))

    @observable("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' inputs of a rank's number at that rank."""
        return self._begin(opts, self.requests.reduce_scatter, _one(outputs), _listed(inputs), _op(opts))

    @observable("reduce_scatter", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Combine all ranks' parts of a tensor at one rank each."""
        return self._begin(opts, self.requests.reduce_scatter, output, tensor, _op(opts))

    @observable("reduce_scatter", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._begin_all(opts, self.requests.reduce_scatter, [(*pair, _op(opts)) for pair in pairs])

    @observable("all_to_all")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Copy the input of each rank's number to that rank."""
        return self._begin(opts, self.requests.all_to_all, outputs, inputs)

    @observable("all_to_all", "alltoall_base")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Copy the part of each rank's number to that rank; no sizes stand for equal parts."""
        return self._begin(opts, self.requests.all_to_all_single, output, tensor, output_sizes, input_sizes)

    @observable("barrier")
    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._begin(opts, self.requests.barrier)

    @observable("barrier")
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those that this rank waits for, whatever `wait_all_ranks` says."""
        del wait_all_ranks
        given = timeout if isinstance(timeout, timedelta | None) else timeout.timeout
        limit_s = None if given is None or given < timedelta(0) else max(given.total_seconds(), SHORTEST_S)
        try:
            self._begin(None, lambda _: self.requests.barrier(limit_s)).wait()
        except DeadlineExceeded as late:
            late.what = f"Rank {self.requests.rank} timed out in monitoredBarrier: {late.what}"
            raise

    @observable("send")
    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Send a tensor to `peer`; tags are for CPU tensors only."""
        return self._post(_one(tensors), peer, tag, is_send=True)

    @observable("recv")
    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from `peer`."""
        return self._post(_one(tensors), peer, tag, is_send=False)

    @observable("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive a CPU tensor from any rank, which the work then names."""
        return self._post(_one(tensors), None, tag, is_send=False)

    def start_coalescing(self, *_: Any) -> None:
        """Begin a block whose collectives torch waits for as one; they run in order anyway."""

    def end_coalescing(self, *_: Any) -> dist.Work:
        """Return a work that is complete when all earlier collectives are."""
        self.group.device_messages.flush()
        return GroupWork(self.group.world.comm_thread.submit(lambda: None), [])

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of all later collectives."""
        self.group.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Finish what was started, then close all connections; ``destroy_process_group`` calls it."""
        self.group.close()

    def abort(self) -> None:
        """End all collectives that are in flight with an error, then close all connections."""
        self.group.abort()
        self.group.close()

    def _post(self, tensor: Tensor, peer: int | None, tag: int, *, is_send: bool) -> dist.Work:
        def post() -> dist.Work:
            plain = memory_of(tensor)
            if not plain.is_contiguous():
                raise UsageError(f"a tensor of shape {tuple(plain.shape)} has gaps: pass its contiguous() copy")
            if plain.device.type == "cpu":
                return self.group.host_messages.post(plain, peer, tag, is_send=is_send)
            return self.group.device_messages.post(plain, peer, is_send=is_send)

        return self._guarded(post)

    def _begin(self, opts: Any, request: Callable[..., Call], *given: Any) -> dist.Work:
        """Begin the call that `request` returns for what is `given`."""
        try:
            call = request(*given, None if opts is None else seconds_of(opts.timeout))
            if self.group.device_messages.waiting:
                self.group.device_messages.flush()
            future = self.group.engine.begin(call, waits=not getattr(opts, "asyncOp", True))
            return GroupWork(future, call.result, call.kind.traits)
        except CommrtError as error:
            raise as_dist_error(error) from error.__cause__

    def _begin_all(self, opts: Any, request: Callable[..., Call], given: Iterable[Sequence[Any]]) -> dist.Work:
        """Begin several calls, of which the work stands for the last one: they run in order."""

        def begin() -> dist.Work:
            limit_s = None if opts is None else seconds_of(opts.timeout)
            calls = [request(*each, limit_s) for each in given]
            if not calls:
                raise UsageError("no tensors were given: give at least one")
            self.group.device_messages.flush()
            futures = [self.group.engine.begin(call) for call in calls]
            return GroupWork(futures[-1], [tensor for call in calls for tensor in call.result])

        return self._guarded(begin)

    def _guarded(self, begin: Callable[[], dist.Work]) -> dist.Work:
        try:
            return begin()
        except CommrtError as error:
            raise as_dist_error(error) from error.__cause__

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing


def _one(tensors: Any) -> Tensor:
    """Return the one tensor of a list, or a tensor alone."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise as_dist_error(UsageError(f"{len(tensors)} tensors in one call: give one, as a process has one device"))
    return cast("Tensor", tensors[0])


def _listed(tensors: Any) -> list[Tensor]:
    """Return the tensors of a list, of a list in a list, or of none."""
    return list(tensors) if not tensors or isinstance(tensors[0], Tensor) else list(tensors[0])


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _sparse_all_reduce(tensor: Tensor, op: Any, ranks: int, all_gather: Callable[..., dist.Work]) -> dist.Work:
    """Replace the sparse `tensor` by the sum over all ranks; the work is complete when this returns.

    Cost: three all-gathers, of the counts, then of as many indices and values as the fullest rank has.
    """
    if op != dist.ReduceOp.SUM:
        raise UsageError(f"{op} of sparse tensors: only their SUM can be formed; pass dense copies")

    def gathered(rows: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(rows) for _ in range(ranks)]
        all_gather(outputs, rows).wait()
        return outputs

    own = tensor.coalesce()
    counts = gathered(torch.tensor([own._nnz()], device=own.device))  # noqa: SLF001  # torch's name for it
    most = int(max(count.item() for count in counts))
    indices = gathered(_padded(own.indices().t(), most))
    values = gathered(_padded(own.values(), most))
    parts = [
        torch.sparse_coo_tensor(index[: int(count)].t(), value[: int(count)], own.shape)
        for index, value, count in zip(indices, values, counts, strict=True)
    ]
    total = sum(parts[1:], parts[0]).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return GroupWork(None, [tensor])


def _padded(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded
