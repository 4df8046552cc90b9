# SPDX-License-Identifier: Apache-2.0
"""The world: this rank, how many there are, and the one lane on which it talks to the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store

from commrt.algorithms import tree
from commrt.algorithms.torus import Torus2D
from commrt.errors import CommrtError, DisagreementError, Evicted, TransportError, UsageError
from commrt.membership.crash_reports import diagnose, leave_report, wait_for_readers
from commrt.membership.generations import Loss
from commrt.membership.launcher import wants_nvtx
from commrt.membership.store_client import clone_connection
from commrt.membership.world_config import WorldConfig
from commrt.program import among, program
from commrt.recording import Nvtx, Recorder
from commrt.runtime.around import Around
from commrt.runtime.comparison import Comparison
from commrt.runtime.connection import connect_gpu, gpu, own_device
from commrt.runtime.elastic import REFUSALS, Elastic
from commrt.runtime.executor import bind
from commrt.runtime.questions import Questions
from commrt.runtime.reconnection import Means
from commrt.runtime.summing import Summing, checked, require_moment
from commrt.runtime.work import Work
from commrt.schedule import Algorithm, Schedule
from commrt.threads.lane import Lane
from commrt.threads.streams import streams_of
from commrt.transport.media import Media, Queueing
from commrt.transport.protocol import Moment, Transport
from commrt.transport.vacant import VacantTransport

__all__ = ["World"]

UNNAMED = Moment(0, "run")


class World:
    """A set of ranks that can run schedules on tensors; it may become smaller (`commrt.runtime.elastic`).

    All communication happens on one thread, in the order of the calls, which every rank must make alike. Use it as a
    context manager: left by an error, it tells the others at once. Of ``with`` statements inside each other only the
    outermost ends the world, so a function may have its own around `init`.
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        local_rank: int = 0,
        launcher: str = "given",
        *,
        holds_store: bool = False,
        means: Means | None = None,
        config: WorldConfig | None = None,
    ) -> None:
        self.is_successor = config is not None
        """This process takes the place of one that was gone while the others trained."""
        self.config = config
        """What this process has to fit, as it takes the place of a rank that is gone; None for a first comer."""
        self.transport = Media(transport)
        self.store = store
        self.local_rank = local_rank
        self.launcher = launcher
        self.lane = Lane(self._on_failure, f"commrt-rank{transport.rank}")
        self.holds_store = holds_store
        """The store ends with this process."""
        self.attached = 0
        """Models attached so far."""
        self.joined: object = None  # the replica that is in join()
        self.around = Around()
        self._gathered = False
        self.recorder: Recorder | None = Nvtx() if wants_nvtx() else None
        self._late_failure: TransportError | None = None
        self._closed = self._inherited = False
        self._entered = 0
        self.elastic = Elastic(store, self.transport, self.lane, means, self._connected_gpu)
        self._comparison = Comparison(self.transport, self.elastic.submit)
        self._questions = Questions(self.transport, self.elastic, self._comparison)
        self._summing = Summing(self.transport, self.lane, self.elastic, self._comparison)
        _OPEN.add(self)

    @property
    def rank(self) -> int:
        """This rank, 0..size-1."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks there were at first."""
        return self.transport.ranks

    @property
    def device(self) -> torch.device:
        """Where this rank's model belongs: its own GPU, or the CPU where there is none; raises `UsageError`."""
        return own_device(self.local_rank)

    @property
    def members(self) -> Sequence[int]:
        """The ranks that take part: all, until one is lost and the others go on."""
        return self.elastic.generation.ranks

    @property
    def lost(self) -> tuple[Loss, ...]:
        """The ranks without which the others went on, and why."""
        return self.elastic.generation.lost

    @property
    def timeout_s(self) -> float:
        """The deadline of every wait for a peer, once all are connected."""
        return self.transport.timeout_s

    @property
    def closed(self) -> bool:
        """True after `close`, `abort`, or a failure."""
        return self._closed or self.lane.failure is not None or self._late_failure is not None

    def wait(self) -> None:
        """Wait for all exchanges, as before a checkpoint; raises what ended a transfer, on a GPU perhaps long ago."""
        self.lane.submit(self.transport.wait).result()
        self._summing.require_agreement()

    @property
    def untold(self) -> TransportError | None:
        """What ended a transfer on a GPU, while no call has raised it."""
        return None if self._closed or self.lane.failure is not None else self._late_failure

    def require_all_ranks(self, what: str) -> None:
        """Raise `UsageError` inside ``join()``, where `what` could meet another rank's roll call."""
        if self.joined is not None:
            raise UsageError(
                f"{what} inside join(): ranks that have left it answer its roll calls and nothing else, so do this "
                "before join() or after it"
            )

    def _require_a_place(self, what: str) -> None:
        if self.config is not None:
            raise UsageError(
                f"{what}: this process takes the place of rank {self.rank}, which is gone, while the others train: the "
                "first thing to do with them is to attach() the model that trains with BackupWorkers"
            )

    @contextmanager
    def gathered(self, what: str) -> Iterator[None]:
        """Around `what`, which all ranks do together; raises `UsageError` inside ``join()`` and on the lane."""
        self.lane.require_unbroken()
        self.require_all_ranks(what)
        self._require_a_place(what)
        if self._gathered:
            yield
            return
        self._gathered = True
        try:
            self.around.before_collective()
            with self.elastic.collective(what), torch.inference_mode(mode=False):
                yield  # without inference mode, as the communication thread writes to what is made in here
        except BaseException as error:
            self.around.failed(error)
            if self.elastic.is_elastic and not isinstance(error, REFUSALS):
                self.abort(error)  # the others must not wait for the rest of it
            raise
        finally:
            self._gathered = False

    def agree(self, topic: str, **claim: str) -> None:
        """Compare `claim` with all ranks (`store.agreement`); where a model gossips, with those who are left.

        The world goes on after a `DisagreementError`, which every rank gets. Whatever else ends the
        question is this rank's alone, so it could take an answer for that to another question: the world is given up.
        Raises `TransportClosed` at once if it was before, or closed, `UsageError` inside a ``join()``.
        """
        with self.gathered(f"agree ({topic})"):
            try:
                self._questions.ask(self.store, topic, claim)
            except DisagreementError:
                raise
            except BaseException as error:
                self.abort(error)
                raise

    def all_equal(self, topic: str, fingerprint: str) -> bool:
        """True on every rank if all came with the same `fingerprint`; collective.

        Raises `DisagreementError` if one came with another `topic`.
        """
        try:
            self.agree(topic, fingerprint=fingerprint)
        except DisagreementError as error:
            if error.about != "fingerprint":
                raise
            return False
        return True

    def connect(self, device: torch.device | str) -> None:
        """Let tensors on the GPU `device` be exchanged, through NCCL; collective, and nothing the second time.

        `attach` does so for its model. Each rank has one GPU, and its own; what is exchanged is queued on a stream
        of the lane's, behind what was queued on the caller's current stream, which waits for it when a result is
        taken. Raises `UsageError` for a GPU that another rank chose or an NCCL that cannot be used, `TransportError`.
        """
        if self.size == 1:
            return
        chosen = gpu(device)
        self.transport.require_no_other(chosen)
        if not self.transport.reaches(chosen):
            if self.config is None:
                self.agree("connect")
            self.lane.submit(lambda: self._connect(chosen)).result()

    def _connect(self, device: torch.device) -> None:
        streams = streams_of(device)
        streams.enter()
        self.transport.add(device, self._transport_of(device))
        self.lane.streams = streams

    def _transport_of(self, device: torch.device) -> Queueing:
        if self.config is not None:
            return VacantTransport(self.rank, self.members, self.timeout_s)
        return self._connected_gpu(self._questions.shelf, device)

    def _connected_gpu(self, name: str, device: torch.device) -> Queueing:
        shelf, members = PrefixStore(name, clone_connection(self.store)), self.members
        return connect_gpu(shelf, self.rank, members, self.timeout_s, device, self._on_late_failure)

    def _on_late_failure(self, failure: TransportError) -> None:
        """Of what was queued on a GPU: nobody waits for it, but others may wait for this rank."""
        if self.elastic.is_elastic:  # who queues what may be lost waits for it
            return
        self._late_failure = failure
        leave_report(self.store, self.rank, failure)
        self._questions.end_next(self.store, failure)

    def run(self, schedule: Schedule, buffer: Tensor, moment: Moment = UNNAMED, *, async_op: bool = False) -> Work:
        """Run `schedule` on `buffer` [numel] in place and wait for it; collective among the ranks that it names.

        With `async_op` it returns a `Work` to wait for at once. What is begun in one order on all ranks runs in it.

        The schedule is trusted: `commrt.prove` it first. Before it runs for the first time on so many elements of a
        dtype, and not again, these ranks compare the three, at the cost of an all-reduce of 128 bytes per rank. That
        all make the same calls in the same order remains the caller's promise. Before anything is sent it raises
        `UsageError` for what cannot work, `DisagreementError` on all ranks if they differ; the world goes on.
        """
        require_moment(moment)
        if not isinstance(schedule, Schedule):
            raise UsageError(f"{schedule!r} is no schedule: an algorithm makes one with its schedule(step, ranks)")
        if schedule.ranks != self.size:
            raise UsageError(
                f"{schedule.name} is a schedule of {schedule.ranks} ranks and the world has {self.size}: say which of "
                f"them play it with schedule.over(ranks, world={self.size})"
            )
        with self.gathered("run()"):
            self._comparison.require(schedule, buffer, self.members, self.elastic.generation.number)
            work = Work(buffer, self.rank, self.lane.submit(lambda: self._run(schedule, buffer, moment)))
            if not async_op or self.elastic.is_elastic:  # else what all do together would not be over at its end
                work.wait()
        return work

    def all_reduce(
        self,
        tensor: Tensor,
        op: Literal["mean", "sum"] = "mean",
        *,
        algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
        wire: torch.dtype | None = None,
        async_op: bool = False,
        moment: Moment = UNNAMED,
    ) -> Work:
        """Overwrite `tensor`, of any shape, with the mean or the sum of all ranks' along `algorithm`; collective.

        Waits, unless `async_op`: then wait for the `Work`. `wire` is the dtype that travels, as for `attach`; integers
        (int32, int64) have no mean. A GPU is connected. `moment` is what errors and traces call it. Where a model
        gossips or has backup workers it is over when the call returns, of those who are left if a rank is lost, and
        takes memory for a copy. Raises `UsageError` before anything is sent, `DisagreementError` where calls differ;
        the world goes on if sizes, dtypes that travel or algorithms do that were not used before on any rank.
        """
        call = checked(tensor, op, algorithm, wire, moment)
        with self.gathered("all_reduce()"):
            if tensor.is_cuda:
                self.connect(tensor.device)
            if async_op and not self.elastic.is_elastic:
                return Work(tensor, self.rank, self._summing.begin(call, self.recorder))
            self._summing.now(call, self.recorder)
        return Work(tensor, self.rank)

    def _run(self, schedule: Schedule, buffer: Tensor, moment: Moment) -> None:
        self.run_now(schedule, buffer, moment)

    def run_now(self, schedule: Schedule, buffer: Tensor, moment: Moment, members: Sequence[int] = ()) -> int:
        """As `run`, for tasks that are on the lane already, with `members` as its ranks; the bytes this rank sent."""
        mine = among(schedule, members, self.rank, self.size) if members else program(schedule, self.rank)
        bound = bind(mine, buffer, self.transport)
        bound.run(moment)
        return bound.nbytes_sent

    def require_same_now(self, digest: str, members: Sequence[int], step: int) -> None:
        """Raise `DisagreementError` on all members if theirs differ; on the lane, at the cost of a small all-reduce."""
        self._comparison.require_same_now(digest, members, step)

    def broadcast_now(self, buffer: Tensor, members: Sequence[int], moment: Moment) -> int:
        """Copy `buffer` from ``members[0]`` to all members along a binomial tree; on the lane, by members only."""
        return self.run_now(tree.broadcast(len(members)), buffer, moment, members)

    def _on_failure(self, failure: BaseException) -> None:
        """Tell the others, let go of them, then find out whose fault it was."""
        if isinstance(failure, Evicted):  # the others go on, and must not hear from this process
            self.transport.abort()
            return
        self.elastic.depart(f"it failed: {failure}")
        leave_report(self.store, self.rank, failure)
        self.transport.abort()
        self._questions.end_next(self.store, failure)
        diagnose(self.store, self.rank, self.size, failure)
        if self.holds_store:
            wait_for_readers(self.store)

    def close(self) -> None:
        """Finish what was started, then drop connections; Ctrl-C meanwhile ends it. Not collective; safe twice."""
        self.lane.require_elsewhere()
        if not self.closed:
            self.around.end()
        self._closed = True
        if self._inherited:
            return
        try:
            self.lane.close()
        except BaseException:  # the lane still runs
            self.transport.abort()
            raise
        around, self.around = self.around, Around()
        around.leave()
        self.elastic.depart("it closed its world", finished=True)
        if self.holds_store and self.lane.failure is None:
            self.elastic.outlast_the_others()
        try:
            self.transport.close()
        finally:
            self.elastic.close()
            self.store = HashStore()  # torch's own may end now: its next group must not find what this one left there

    def abort(self, reason: BaseException) -> None:
        """Give up because of `reason`: a running transfer ends, and ranks that wait for this one learn why.

        Safe to call twice, after a failure, and while `close` waits. `close` is still due.
        """
        if self._inherited:
            return
        is_news = False
        try:
            is_news = self.lane.give_up(reason) and not isinstance(reason, Evicted)
            if is_news:
                self.elastic.depart(f"it gave up: {reason}")
                leave_report(self.store, self.rank, reason)
        finally:  # a second Ctrl-C may end the report
            self.transport.abort()
        if is_news:
            self._questions.end_next(self.store, reason)
        if is_news and self.holds_store and isinstance(reason, Exception) and not isinstance(reason, CommrtError):
            wait_for_readers(self.store)  # the others know nothing of this rank's own errors

    def leave_to_parent(self) -> None:
        """In a forked child: closed, without a word to the peers or the store, to whom the parent is this rank."""
        self._closed = self._inherited = True
        self.lane.leave_to_parent()

    def __enter__(self) -> Self:
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if self._entered:
            return
        try:
            if error is not None:
                self.abort(error)
        finally:
            self.close()


_OPEN: WeakSet[World] = WeakSet()


def _after_fork() -> None:
    """In the child."""
    for world in tuple(_OPEN):
        world.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
