# SPDX-License-Identifier: Apache-2.0
"""The methods that torch.distributed calls on a process group, by c10d's names. All return a `Work`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commrt.c10d.call import Call, memory_of
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.group_work import GroupWork, as_dist_error, seconds_of
from commrt.c10d.observed import observable
from commrt.c10d.sparse import sparse_all_reduce
from commrt.errors import CommrtError, DeadlineExceeded, UsageError
from commrt.torch_import import NAME, untraced

__all__ = ["NAME", "Methods"]

SHORTEST_S = 0.001
"""The timeout of a barrier for which 0 is given."""


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
        (tensor,) = _listed(tensors)
        if tensor.is_sparse:
            return self._guarded(lambda: sparse_all_reduce(tensor, _op(opts), self.requests.size, self.allgather))
        return self._begin(opts, lambda: self.requests.all_reduce(tensor, _op(opts), _limit(opts)))

    @observable("all_reduce")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Do `allreduce` of several tensors."""
        return self._begin_all(lambda: [self.requests.all_reduce(one, _op(opts), _limit(opts)) for one in tensors])

    @observable("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        (tensor,) = _listed(tensors)
        return self._begin(opts, lambda: self.requests.broadcast(tensor, _root(opts), _limit(opts)))

    @observable("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' tensors at the root."""
        (tensor,) = _listed(tensors)
        return self._begin(opts, lambda: self.requests.reduce(tensor, _op(opts), _root(opts), _limit(opts)))

    @observable("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to all ranks."""
        (tensor,) = _listed(inputs)
        return self._begin(opts, lambda: self.requests.all_gather(_lists(outputs)[0], tensor, _limit(opts)))

    @observable("all_gather")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `allgather` of several tensors; ``outputs[rank][i]`` is for input i of that rank."""
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._begin_all(lambda: [self.requests.all_gather(*pair, _limit(opts)) for pair in pairs])

    @observable("all_gather", "_allgather_base")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to all ranks, into one tensor."""
        return self._begin(opts, lambda: self.requests.all_gather(output, tensor, _limit(opts)))

    @observable("all_gather", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `all_gather_single` of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._begin_all(lambda: [self.requests.all_gather(*pair, _limit(opts)) for pair in pairs])

    @observable("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy each rank's tensor to the root."""
        (tensor,) = _listed(inputs)
        listed = _lists(outputs)[0] if outputs else []
        return self._begin(opts, lambda: self.requests.gather(listed, tensor, _root(opts), _limit(opts)))

    @observable("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensors to one rank each."""
        (output,) = _listed(outputs)
        listed = _lists(inputs)[0] if inputs else []
        return self._begin(opts, lambda: self.requests.scatter(output, listed, _root(opts), _limit(opts)))

    @observable("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Combine all ranks' inputs of a rank's number at that rank."""
        (output,) = _listed(outputs)
        return self._begin(
            opts, lambda: self.requests.reduce_scatter(output, _lists(inputs)[0], _op(opts), _limit(opts))
        )

    @observable("reduce_scatter", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Combine all ranks' parts of a tensor at one rank each."""
        return self._begin(opts, lambda: self.requests.reduce_scatter(output, tensor, _op(opts), _limit(opts)))

    @observable("reduce_scatter", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._begin_all(lambda: [self.requests.reduce_scatter(*pair, _op(opts), _limit(opts)) for pair in pairs])

    @observable("all_to_all")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Copy the input of each rank's number to that rank."""
        return self._begin(opts, lambda: self.requests.all_to_all(outputs, inputs, _limit(opts)))

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
        sizes, limit_s = (output_sizes, input_sizes), _limit(opts)
        return self._begin(opts, lambda: self.requests.all_to_all_single(output, tensor, *sizes, limit_s))

    @observable("barrier")
    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._begin(opts, lambda: self.requests.barrier(_limit(opts)))

    @observable("barrier")
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those that this rank waits for, whatever `wait_all_ranks` says."""
        del wait_all_ranks
        given = timeout if isinstance(timeout, timedelta | None) else timeout.timeout
        limit_s = None if given is None or given < timedelta(0) else max(given.total_seconds(), SHORTEST_S)
        try:
            self._begin(None, lambda: self.requests.barrier(limit_s)).wait()
        except DeadlineExceeded as late:
            late.what = f"Rank {self.requests.rank} timed out in monitoredBarrier: {late.what}"
            raise

    @observable("send")
    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Send a tensor to `peer`; tags are for CPU tensors only."""
        (tensor,) = _listed(tensors)
        return self._guarded(lambda: self._post(tensor, peer, tag, is_send=True))

    @observable("recv")
    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from `peer`."""
        (tensor,) = _listed(tensors)
        return self._guarded(lambda: self._post(tensor, peer, tag, is_send=False))

    @observable("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive a CPU tensor from any rank, which the work then names."""
        (tensor,) = _listed(tensors)
        return self._guarded(lambda: self._post(tensor, None, tag, is_send=False))

    def after_all(self) -> dist.Work:
        """Return a work that is complete when all earlier collectives are."""
        self.group.device_messages.flush()
        return GroupWork(self.group.world.comm_thread.submit(lambda: None), [])

    def _post(self, tensor: Tensor, peer: int | None, tag: int, *, is_send: bool) -> dist.Work:
        tensor = memory_of(tensor)
        if not tensor.is_contiguous():
            raise UsageError(f"a tensor of shape {tuple(tensor.shape)} has gaps: pass its contiguous() copy")
        if tensor.device.type == "cpu":
            return self.group.host_messages.post(tensor, peer, tag, is_send=is_send)
        return self.group.device_messages.post(tensor, peer, is_send=is_send)

    def _begin(self, opts: Any, request: Callable[[], Call]) -> dist.Work:
        return self._guarded(lambda: self._begin_call(request(), waits=not getattr(opts, "asyncOp", True)))

    def _begin_all(self, requests: Callable[[], Sequence[Call]]) -> dist.Work:
        """Begin several calls, of which the work stands for the last one: they run in order."""
        return self._guarded(lambda: self._begin_calls(requests()))

    def _begin_call(self, call: Call, *, waits: bool) -> GroupWork:
        self.group.device_messages.flush()
        return GroupWork(self.group.engine.begin(call, waits=waits), call.result, call.traits)

    def _begin_calls(self, calls: Sequence[Call]) -> GroupWork:
        if not calls:
            raise UsageError("no tensors were given: give at least one")
        self.group.device_messages.flush()
        works = [self.group.engine.begin(call) for call in calls]
        return GroupWork(works[-1], [tensor for call in calls for tensor in call.result])

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


def _listed(tensors: Any) -> list[Tensor]:
    """Return the one tensor of a list, or a tensor alone, as a list."""
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(listed) != 1:
        raise as_dist_error(UsageError(f"{len(listed)} tensors in one call: give one, as a process has one device"))
    return listed


def _lists(tensors: Any) -> list[list[Tensor]]:
    return [list(tensors)] if isinstance(tensors[0], Tensor) else [list(each) for each in tensors]


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _limit(opts: Any) -> float | None:
    return None if opts is None else seconds_of(opts.timeout)
