# SPDX-License-Identifier: Apache-2.0
"""The world: this rank, the others, and all that they can be called to do together.

It joins the other modules of `commrt.runtime`. Its own state is which collective is running
(`World.collective`), and attributes of which each says who writes it. All else runs in the modules
that it calls, most of it on the communication thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.algorithm import Algorithm
from commrt.errors import DisagreementError, UsageError
from commrt.other_names import IN_WORLD, hinting
from commrt.program import member_program
from commrt.runtime.all_reduce_call import Op, check_all_reduce_call, require_writable
from commrt.runtime.comparison import ConsistencyCheck, claim_text
from commrt.runtime.connection import ReconnectOptions
from commrt.runtime.ending import Ending
from commrt.runtime.executor import bind, cut
from commrt.runtime.generation import Generation, Loss
from commrt.runtime.gpu_connection import connect_world, default_device
from commrt.runtime.membership import REFUSALS, Begin, Membership, RunNow
from commrt.runtime.model_hooks import NO_HOOKS
from commrt.runtime.object_rows import (
    all_gather_among,
    broadcast_among,
    packed,
    require_member,
    unpacked,
)
from commrt.runtime.prepared_runs import PreparedRuns, check_run
from commrt.runtime.sums import Sums
from commrt.runtime.tags import UNNAMED, UNNAMED_SUM
from commrt.runtime.untraced import untraced
from commrt.runtime.whereabouts import Trained, whereabouts
from commrt.runtime.wire import AnyWire
from commrt.runtime.work import Work
from commrt.schedule import Schedule
from commrt.store.environment import is_on
from commrt.store.reports import Call
from commrt.store.world_config import WorldConfig
from commrt.threads.comm_thread import CommThread
from commrt.threads.forking import release_in_forked_child
from commrt.threads.recording import Nvtx, Recorder
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag, Transport

if TYPE_CHECKING:
    from commrt.runtime.explanation import Explanation

INTERNAL = frozenset(
    {
        "attached",
        "collective",
        "comm_thread",
        "config",
        "consistency",
        "ending",
        "holds_store",
        "hooks",
        "joined",
        "latest_collective",
        "membership",
        "reconnect_options",
        "require_all_ranks",
        "run_now",
        "trained",
        "whereabouts",
    }
)
"""Names of a world that are for commrt itself: ``dir()`` leaves them out."""
BROADCAST = Tag(0, "broadcast")
GATHER = Tag(0, "gather")


def _nothing() -> None:
    return None


@hinting("world", IN_WORLD)
@untraced
class World:
    """Ranks that run schedules on tensors; they may go on without lost ones (`commrt.elastic`).

    One thread at a time runs all communication, in the order of the calls: one of its own, or the
    caller's in its place. Every rank must make the same calls in the same order. Use it as a
    context manager: after an error in the ``with`` statement, the other ranks learn of it at once.
    Of nested ``with`` statements only the outermost closes the world, so a function may have its
    own.

    Methods are for the thread that trains, or for callbacks of its transfers, if they do not say
    otherwise.
    Attributes and properties may be read on any thread. Attributes that do not say who writes them
    never change; the others change on the thread that trains, or that closes the world. Properties
    show what other objects hold, which the communication thread may change.
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        local_rank: int = 0,
        launcher: str = "given",
        *,
        holds_store: bool = False,
        reconnect_options: ReconnectOptions | None = None,
        config: WorldConfig | None = None,
    ) -> None:
        self.config = config
        """What this process must fit until it has taken a lost rank's place; None for others.

        `commrt.training.admission.letting_in` sets it to None then.
        """
        self.is_replacement = config is not None
        """True if this process came while the others train, to a lost rank's place or a new one."""
        self.rank = transport.rank
        """This rank, 0..size-1."""
        self.founders = len(transport.members)
        """The number of ranks at the start."""
        self.size = max(self.founders, reconnect_options.places if reconnect_options else 0)
        """The number of places for ranks: as many as at the start, or ``init(up_to=)``.

        See `members`.
        """
        self.transport = TransportByDevice(transport, self.size)
        """Moves bytes between the ranks, in the memory of any device."""
        self.store = store
        """torch's store, which the ranks share; put your own keys behind a `PrefixStore`.

        `ending` lets go of it when the world closes.
        """
        self.local_rank = local_rank
        """This rank's number on its host, from the launcher."""
        self.launcher = launcher
        """The launcher's name."""
        self.ending = Ending(self, self._forget_programs)  # which reads this world later
        """How this world ends, and whether it has."""
        self.comm_thread = CommThread(
            self.ending.on_failure, f"commrt-rank{self.rank}", lambda: self.timeout_s
        )
        self.holds_store = holds_store
        """True if the store ends with this process."""
        self.attached = 0
        """How many models were attached so far: `attach` and the hook for DDP count."""
        self.joined: object = None
        """The replica in ``join()``; `training/joining` sets it and takes it away.

        Ranks that have left that only say that they have no data.
        """
        self.hooks = NO_HOOKS
        """What the attached model wants to be called for.

        Backup workers set it, and take it away when they detach; so does `ending`.
        """
        self.recorder = Nvtx() if is_on("COMMRT_NVTX") else None
        self.trained: Callable[[], Trained | None] = _nothing
        """Returns the latest attached model, while it lives; that sets it."""
        self.latest_collective = ""
        """The latest one since the latest step; who ends steps sets it to "", for errors."""
        self._collective: str | None = None  # which one runs, on the training thread
        self._entered = 0  # ``with`` statements around this world
        self.reconnect_options = reconnect_options
        """How ranks connect again after one was lost; None in a world that cannot.

        `ending` sets it to None when the world closes.
        """
        founders = Generation(0, dict.fromkeys(transport.members, 0))
        self.membership = Membership(founders, self.comm_thread)
        """Who the members are; `commrt.elastic` puts its own in place (`survive_losses`, `end`).

        `Membership` says which thread writes what is in it.
        """
        self.consistency = ConsistencyCheck(self.transport)
        # these two read the number of the generation at once
        self._runs = PreparedRuns(self.transport, self, self.consistency.require_same_call_now)
        self._sums = Sums(
            self.transport, self.comm_thread, self, self.consistency.require_same_call_now
        )
        release_in_forked_child(self.ending)

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU without one; raises `UsageError` for too many ranks."""
        return default_device(self.local_rank)

    @property
    def members(self) -> Sequence[int]:
        """The ranks that take part; they change when one is lost or comes."""
        return self.membership.ranks

    @property
    def lost(self) -> tuple[Loss, ...]:
        """The lost ranks without which the others go on, and why; not those that were replaced."""
        return self.membership.lost

    @property
    def timeout_s(self) -> float:
        """The deadline of every wait for a peer, once all are connected."""
        return self.transport.timeout_s

    @property
    def recorder(self) -> Recorder | None:
        """Receives ranges of time, for profilers; None for none but torch's."""
        return self.comm_thread.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.comm_thread.recorder = recorder

    @property
    def closed(self) -> bool:
        """True after `close`, `abort`, or a failure."""
        return self.ending.has_begun

    def run(
        self, schedule: Schedule, buffer: Tensor, tag: Tag = UNNAMED, *, async_op: bool = False
    ) -> Work:
        """Run `schedule` on `buffer` [numel] in place. Collective among the ranks that it names.

        The buffer is cut into ``schedule.chunks`` equal chunks. Other sizes are refused, unless
        each rank ends with the same sum in all chunks, as after an all-reduce or a broadcast. The
        call waits for the result, unless `async_op`: then wait for the `Work`. commrt does not
        verify the schedule here: `commrt.prove` it first. The first time that it runs on so many
        elements of a dtype, its ranks compare the three, at the cost of an all-reduce of 128 bytes
        per rank. It stays bound to the buffer. A call that waits may run on the calling thread: an
        exception from a signal handler, such as Ctrl-C, then ends the world; in `Work.wait` it ends
        the wait only.

        Before anything is sent it raises `UsageError` for what cannot work, and `DisagreementError`
        on all ranks if they differ; the world stays usable.
        """
        check_run(schedule, buffer, tag, self.size)
        if not async_op and self._is_plain and self._runs.known(schedule, buffer) is not None:
            listener = self.comm_thread.listener
            self.comm_thread.call(partial(self._runs.run, schedule, buffer, tag, listener))
            self.latest_collective = "run()"
            return Work([buffer], self.rank)

        def run_now(row: Tensor) -> None:
            self._runs.run(schedule, row, tag, self.comm_thread.listener)

        def begin() -> RunNow:
            self._runs.require_possible(schedule, buffer)
            return run_now

        with self.collective("run()"):
            return self._work(begin, buffer, async_op=async_op)

    @property
    def _is_plain(self) -> bool:
        """True if no model or other rank decides what a call does: what was checked is repeated.

        False in torch's inference mode, in which the calling thread may not write.
        """
        if self.hooks is not NO_HOOKS or self.membership.is_elastic:
            return False
        is_complete = self.joined is None and self.config is None
        return is_complete and not torch.is_inference_mode_enabled()

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "mean",
        *,
        algorithm: Algorithm | str | None = None,
        wire: AnyWire | str | None = None,
        residual: Tensor | None = None,
        async_op: bool = False,
        tag: Tag = UNNAMED_SUM,
    ) -> Work:
        """Overwrite `tensor`, of any shape, with all ranks' mean or sum. Collective.

        By default it takes one step for up to 16 KB among up to 16 ranks, in which each sends all
        to all others, and ``Torus2D()`` for more.

        It waits for the result, unless `async_op`: then wait for the `Work`. As in `run`, Ctrl-C in
        a call that waits may end the world. `op` may be torch's ``ReduceOp.SUM`` or ``AVG`` too.
        `algorithm` and `wire`, what travels, are as for `attach`, or names, such as "ring" and
        "bf16". A wire with feedback keeps what rounding lost in `residual`, fp32 [elements], zeros
        at first. int32 and int64 have a sum and no mean. `tag` names the transfer in errors and
        traces. While a model gossips, has backup workers or trains by local SGD, the call always
        waits, copies the tensor, and goes on without lost ranks.

        Before anything is sent it raises `UsageError` for what cannot work, and `DisagreementError`
        on all ranks if sizes, wire dtypes or algorithms differ in a call that is new to them. The
        world stays usable then. For other differences between the calls it raises
        `DisagreementError` later, and ends the world. After a `TransportError` a part of a tensor
        of more than 2^20 elements on a CPU may hold the result already: make such a tensor anew.
        """
        may_repeat = not async_op and residual is None and isinstance(tag, Tag) and self._is_plain
        known = self._sums.known(tensor, op, algorithm, wire) if may_repeat else None
        if known is not None:
            self.comm_thread.call(partial(self._sums.repeat, known, tensor, None, tag))
            self.latest_collective = "all_reduce()"
            return Work([tensor], self.rank)
        call = check_all_reduce_call(tensor, op, algorithm, wire, tag, residual)

        def begin() -> RunNow:
            schedule = self._sums.schedule(algorithm, call)

            def run_now(row: Tensor) -> None:
                self._sums.run(schedule, call, row, residual, tag)

            return run_now

        with self.collective("all_reduce()"):
            if tensor.is_cuda:
                self.connect(tensor.device)
            work = self._work(begin, tensor, residual, async_op=async_op)
        if may_repeat and not tensor.is_cuda:
            self._sums.remember(tensor, op, algorithm, wire, call)
        return work

    def _work(
        self, begin: Begin, tensor: Tensor, residual: Tensor | None = None, *, async_op: bool
    ) -> Work:
        at_once = not (async_op or tensor.is_cuda)  # in CUDA or NCCL nothing can interrupt a wait
        work = Work(
            [tensor],
            self.rank,
            self.membership.begin_call(begin, tensor, residual, at_once=at_once),
        )
        if not async_op:
            work.wait()
        return work

    def explain(
        self,
        nbytes: int,
        *,
        algorithm: Algorithm | str | None = None,
        wire: AnyWire | str | None = None,
        device: torch.device | str = "cpu",
    ) -> Explanation:
        """Return what `all_reduce` of `nbytes` of fp32 values runs on this rank, and its price.

        Print it. Schedule, transport, wire and kernel are those of a call with the same arguments
        on a tensor on `device`. Prices are those of COMMRT_CLUSTER, or of a small server. It sends
        nothing: any rank may call it alone. Raises `UsageError` and `ScheduleError` as the call
        would, for a GPU that is not connected yet, and for a cluster that cannot be.
        """
        from commrt.runtime.explanation import all_reduce_of, explained  # noqa: PLC0415  # prices

        call = all_reduce_of(nbytes, algorithm, wire, device)
        return explained(call, self._sums.schedule(algorithm, call), self.members, self.transport)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrite `tensor`, of any shape and dtype, with that of rank `root`. Collective.

        It waits for the result, and goes on without lost ranks where `all_reduce` does. Raises
        `UsageError` for what cannot be sent and if `root` is lost, and `DisagreementError` on all
        ranks if sizes, dtypes or roots differ in a call that is new to them.
        """
        require_writable("broadcast()", tensor)

        def begin() -> RunNow:
            members = self.membership.ranks
            require_member(root, members, "broadcast()")
            schedule = broadcast_among(members, root, self.size)
            self._runs.require_possible(schedule, row)

            def run_now(copied: Tensor) -> None:
                self._runs.run(schedule, copied, BROADCAST, self.comm_thread.listener)

            return run_now

        with self.collective("broadcast()"):
            row = tensor.detach().contiguous().view(-1)
            if tensor.is_cuda:
                self.connect(tensor.device)
            self._work(begin, row, async_op=False)
            if not tensor.is_contiguous():
                tensor.detach().copy_(row.view_as(tensor))

    def broadcast_object(self, obj: object = None, root: int = 0) -> Any:
        """Return the object of rank `root`, which alone needs to give one. Collective.

        For objects see `all_gather_object`, for the rest `broadcast`.
        """
        with self.collective("broadcast_object()"):
            sent = packed(obj if self.rank == root else None)
            nbytes = torch.tensor([len(sent)], device="cpu")
            self.broadcast(nbytes, root)
            row = sent if self.rank == root else sent.new_empty(int(nbytes))
            self.broadcast(row, root)
        return unpacked(row)

    def all_gather_object(self, obj: object) -> list[Any]:
        """Return the objects of all ranks, in the order of `members`. Collective.

        Objects are numbers, strings, bytes, tensors, and lists, tuples or dicts of these; tensors
        arrive in host memory. Each rank sends as many bytes as the largest object has. Raises
        `UsageError` for other objects. Goes on without lost ranks where `all_reduce` does: their
        objects are missing then.
        """
        with self.collective("all_gather_object()"):
            own = packed(obj)
            sizes = torch.zeros(self.size, 1, dtype=torch.int64, device="cpu")
            sizes[self.rank] = len(own)
            self._gather_rows(sizes)
            # one byte more tells who took part
            rows = torch.zeros(self.size, 1 + int(sizes.max()), dtype=torch.uint8, device="cpu")
            rows[self.rank, 0] = 1
            rows[self.rank, 1 : 1 + len(own)] = own
            self._gather_rows(rows)
        took_part = rows[:, 0].nonzero().flatten().tolist()
        return [unpacked(rows[rank, 1 : 1 + int(sizes[rank])]) for rank in took_part]

    def _gather_rows(self, rows: Tensor) -> None:
        """Overwrite `rows` [places, ...], of which each member has filled its own, with all."""

        def begin() -> RunNow:
            def run_now(copied: Tensor) -> None:
                members = self.membership.ranks
                theirs = copied[list(members)]
                schedule = all_gather_among(members, self.size)
                self._runs.run(schedule, theirs.view(-1), GATHER, self.comm_thread.listener)
                copied[list(members)] = theirs

            return run_now

        self._work(begin, rows, async_op=False)

    def barrier(self) -> None:
        """Return once all ranks have called it. Collective.

        It waits for ranks, not for what their GPUs still do. Raises `DisagreementError` on all
        ranks if one has called `agree` about something else.
        """
        with self.collective("barrier()"):
            self.agree("barrier")

    def agree(self, topic: str, **claim: str) -> None:
        """Return once all ranks left made the same `claim` about `topic`. Collective among those.

        Raises `DisagreementError` on every rank if one differs; the world stays usable. Any other
        error ends the world, since this rank may be the only one to get it, and would then answer
        the wrong question next.
        """
        text = claim_text(topic, claim)
        with self.collective(f"agree ({topic})"):
            try:
                self.consistency.agree(self.membership, topic, text)
            except BaseException as error:
                if not isinstance(error, DisagreementError):
                    self.abort(error)
                raise

    def all_equal(self, topic: str, fingerprint: str) -> bool:
        """Return True if all ranks have one `fingerprint`. Collective; raises as `agree` does."""
        try:
            self.agree(topic, fingerprint=fingerprint)
        except DisagreementError as error:
            if error.about == "fingerprint":
                return False
            raise
        return True

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Do the body on all ranks, on the training thread or in a callback; `what` is for errors.

        Raises `TransportClosed` if the world has ended. Raises `UsageError` inside ``join()``, in a
        callback of a world that survives lost ranks, and in a process that takes a lost rank's
        place until it has attached its model.
        """
        self._require_collective(what)
        if self._collective is not None or self.comm_thread.is_current:
            yield  # inside another one, or in a callback, for which nobody need come
            return
        self._collective = what
        try:
            self.hooks.before_collective()
            # the communication thread writes to tensors made in the body: no inference mode
            with self.membership.collective(what), torch.inference_mode(mode=False):
                self.hooks.when_all_came()
                yield
        except BaseException as error:
            self.hooks.on_collective_error(error)
            if self.membership.is_elastic and not isinstance(error, REFUSALS):
                self.abort(error)  # the others must not wait for the rest of it
            raise
        finally:
            self._collective = None
            self.latest_collective = what

    def _require_collective(self, what: str) -> None:
        """Raise what `collective` raises before anything is done."""
        self.comm_thread.require_working(in_callback=not self.membership.is_elastic)
        self.require_all_ranks(what)
        if self.config is not None:
            raise UsageError(
                f"{what}: this process takes the place of rank {self.rank} while the others train:"
                " the first thing to do with them is to attach() the model that trains with"
                " BackupWorkers"
            )

    def require_all_ranks(self, what: str) -> None:
        """Raise `UsageError` in ``join()``, where `what` could meet the question who has data."""
        if self.joined is not None:
            raise UsageError(
                f"{what} inside join(): ranks that have left it take part in its steps only, so do"
                " this before join() or after it"
            )

    def whereabouts(self, failure: BaseException) -> Call:
        """Return in which call this rank was that `failure` ended; on any thread."""
        return whereabouts(failure, self._collective, self.latest_collective, self.trained())

    def wait(self) -> None:
        """Wait for all exchanges; raises the error that ended one, on a GPU perhaps long ago.

        Call it before you save a checkpoint: on a GPU an optimizer may have stepped with gradients
        that never came.
        """
        self.comm_thread.submit(self.transport.wait).result()
        self._sums.require_no_mismatch()

    def connect(self, device: torch.device | str) -> None:
        """Connect this rank's GPU `device` with those of the others by NCCL. Collective, once.

        `attach` and `all_reduce` do so. Each rank has one GPU of its own. Exchanges run on a stream
        of the communication thread, after what was queued on the caller's current stream, which
        waits when a result is taken. Raises `UsageError` for a GPU that another rank has, or if
        NCCL cannot be used, and `TransportError`.
        """
        connect_world(self, device)

    def run_now(
        self, schedule: Schedule, buffer: Tensor, tag: Tag, members: Sequence[int] = ()
    ) -> None:
        """Run `schedule` once, unchecked; ``members[i]`` plays rank i. On the comm thread."""
        mine = member_program(schedule, members or range(self.size), self.rank, self.size)
        bind(mine, buffer, self.transport, bounds=cut(schedule, buffer)).run(tag)

    def _forget_programs(self) -> None:
        self._runs.forget()
        self._sums.forget()

    def close(self) -> None:
        """Finish what was started, then close the connections. Not collective.

        Call it again after a Ctrl-C in it. Raises `UsageError` on the communication thread. It also
        says that this rank's data has ended. Not so in a ``finally`` that an exception passes, or
        in an ``except``: where the others go on without lost ranks, they go on without this one, as
        after an error in ``with``. Nor while the process ends, as by ``atexit``: what ended it does
        not show there.
        """
        self.ending.close()

    def abort(self, reason: BaseException) -> None:
        """End the world because of `reason`: a running transfer ends, and waiting ranks learn why.

        On any thread. Safe to call twice, after a failure, and while `close` waits. You must still
        call `close`.
        """
        self.ending.abort(reason)

    def __repr__(self) -> str:
        ranks = f"rank {self.rank} of {len(self.members)}"
        lost = f", lost {[each.rank for each in self.lost]}" if self.lost else ""
        closed = ", closed" if self.closed else ""
        return f"<World: {ranks}{lost}, over {self.transport.kind}, by {self.launcher}{closed}>"

    def __dir__(self) -> list[str]:
        hidden = INTERNAL | IN_WORLD.keys()
        return sorted(name for name in super().__dir__() if name[0] != "_" and name not in hidden)

    def __enter__(self) -> Self:
        self._entered += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._entered -= 1
        if self._entered:
            return
        try:
            if error is not None:
                self.abort(error)
        finally:
            self.ending.close_during(None)
