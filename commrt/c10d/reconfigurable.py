# SPDX-License-Identifier: Apache-2.0
"""The group with ``enable_reconfigure=True``, whose ranks may change (torch 2.14 and on).

torch's protocol: each process has a handle, and ``torch.distributed._reconfigure(uuid, handles)``
makes the processes with these handles the ranks of the group, in their order. Who calls it with
which handles is the caller's to agree on. A group is a world, and a world's ranks are fixed, so
each reconfiguration ends one world, on the thread that calls, and connects the next, under keys of
its own on the group's store, on a thread of its own, which then sets the rank and the size.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ErrorType
from torch.distributed import PrefixStore, ProcessGroup

from commrt.c10d.backend import CommrtBackend
from commrt.c10d.call_options import kept_seconds_of
from commrt.c10d.devices import use_backend
from commrt.c10d.dist_errors import as_dist_error
from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.group_work import GroupWork
from commrt.c10d.methods import collective
from commrt.c10d.name import NAME
from commrt.errors import CommrtError, UsageError
from commrt.threads.calls import start_call
from commrt.threads.future import Future

FIRST = (
    "this group has no ranks yet, as after enable_reconfigure=True or while it is reconfigured:"
    " call torch.distributed._reconfigure(uuid, handles).wait() first"
)


class ReconfigurableBackend(CommrtBackend):
    """A backend that has another world after each `reconfigure`, and none before the first one.

    So it makes none, as the constructor of its parent would, and `group` is a property. The thread
    that calls `reconfigure` ends the world and sets the handles; then a thread of its own sets the
    rank, the size and the next world, and counts derived groups anew. Until it has, what needs a
    world raises. All else is written on the callers' threads, one at a time.
    """

    supports_reconfigure = True

    def __init__(self, options: Any) -> None:
        Backend.__init__(self, options.group_rank, options.group_size)
        self._place: tuple[int, int] = options.group_rank, options.group_size  # rank and size
        self._store = options.store
        self._timeout = options.timeout
        self._name = options.group_id
        self._use_options(options)
        self._handle = f"{NAME}:{uuid4().hex}"
        self._world: ProcessGroupWorld | None = None
        self._used = set[int]()  # all uuids that were given
        self._handles: list[str] = []  # of the present world's ranks
        self._running: Future[None] | None = None  # the latest reconfiguration
        self._uuid = -1  # of the present world
        # groups made of these ranks since the latest reconfiguration
        self._derived = Counter[tuple[int, ...]]()

    @property
    def group(self) -> ProcessGroupWorld:  # type: ignore[override]  # which is fixed there
        """The present world; raises `UsageError` if there is none."""
        if self._world is None:
            raise UsageError(FIRST)
        return self._world

    def rank(self) -> int:
        """Return this process's rank."""
        return self._place[0]

    def size(self) -> int:
        """Return the number of ranks."""
        return self._place[1]

    def get_reconfigure_handle(self) -> str:
        """Return what stands for this process in `reconfigure`; the same as long as it lives."""
        return self._handle

    @collective("reconfigure")
    def reconfigure(self, opts: Any) -> dist.Work:
        """Connect the processes with ``opts.handles``, ranked in this order, or sorted if a set.

        All of them call this with the same handles and ``opts.uuid``, a number that none has used
        before. What is in flight ends with an error. After an error, call it again with another
        number. Raises `UsageError` for a number that was used, and where this process is not among
        the handles; the work raises `TransportError` if one of them does not come in time or dies.
        """
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if self._running is not None and not self._running.done():
            raise UsageError("a reconfiguration is running: wait for its work first")
        if opts.uuid in self._used:
            raise UsageError(
                f"the uuid {opts.uuid} was already used: give one that no reconfiguration had"
                " before"
            )
        if handles.count(self._handle) != 1 or len({*handles}) != len(handles):
            raise UsageError(
                f"the handles {handles} are not each process once, this one ({self._handle}) among"
                " them: collect them by torch.distributed._get_reconfigure_handle()"
            )
        self._used.add(opts.uuid)
        gone = [rank for rank, handle in enumerate(self._handles) if handle not in handles]
        self._end(
            f"the process group is reconfigured, without the ranks {gone}"
            if gone
            else "the group is reconfigured"
        )
        self._handles = handles
        place = handles.index(self._handle), len(handles)
        timeout = opts.timeout or self._timeout
        self._running = start_call(partial(self._connect, opts.uuid, place, timeout))
        return GroupWork(self._running, [], "the reconfiguration")

    def _connect(self, uuid: int, place: tuple[int, int], timeout: Any) -> None:
        rank, size = place
        options = SimpleNamespace(
            store=PrefixStore(f"reconfigured/{uuid}", self._store),
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            global_ranks_in_group=[],
            group_id=self._name,
        )
        world = ProcessGroupWorld(options)
        world.close_with(self)
        self._place = place
        self._world = world
        world.set_timeout(kept_seconds_of(self._timeout))  # which may have changed meanwhile
        self._uuid = uuid
        self._derived.clear()

    def derived(self, ranks: list[int], timeout: Any, name: str) -> CommrtBackend:
        """Return the backend of a group of some `ranks`, all of which call this alike.

        torch numbers the groups that a process has made, which differs between processes that came
        at other times.
        """
        self._derived[*ranks] += 1
        place = f"groups of {self._uuid}/{'_'.join(map(str, ranks))} {self._derived[*ranks]}"
        return CommrtBackend(
            SimpleNamespace(
                store=PrefixStore(place, self._store),
                group_rank=ranks.index(self.rank()),
                group_size=len(ranks),
                timeout=timeout or self._timeout,
                global_ranks_in_group=ranks,
                group_id=name,
            )
        )

    def set_timeout(self, timeout: Any) -> None:
        """Change the deadline of all later collectives, also after reconfigurations."""
        self._timeout = timeout
        if self._world is not None:
            super().set_timeout(timeout)

    def shutdown(self) -> None:
        """See `Methods.shutdown`."""
        if self._world is not None:
            super().shutdown()

    def abort(self) -> None:
        """End what is in flight with an error, and close; `reconfigure` makes new connections.

        A reconfiguration that runs goes on to its own end, or timeout.
        """
        self._end("the process group was aborted")

    def _end(self, reason: str) -> None:
        world = self._world
        self._world = None
        if world is not None:
            world.abort(reason)
            world.close()
            failure = world.world.comm_thread.failure
            if failure is not None:
                failure.__traceback__ = None  # its frames keep the old DDP, whose hooks would run

    def get_error(self) -> ErrorType:
        """Return that there is none: errors are raised by works."""
        return ErrorType.SUCCESS


class ReconfigurableGroup(ProcessGroup):
    """A group whose rank and size are those of its backend.

    torch's C++ keeps the numbers of a backend in Python for good, and asks a group in Python for
    its own.
    """

    def __init__(self, options: Any) -> None:
        ProcessGroup.__init__(self, options.store, options.group_rank, options.group_size)
        self._own = ReconfigurableBackend(options)
        use_backend(self, self._own)

    def new_group(
        self,
        ranks: list[int],
        *,
        timeout: Any,
        backend: Any,
        group_name: Any,
        group_desc: str | None,
        **_: Any,
    ) -> ProcessGroup | None:
        """Return a group of some `ranks`, None elsewhere; ``torch.distributed.new_group`` calls it.

        It goes on as long as its processes live, whatever becomes of this one. Raises `UsageError`
        for a `backend` other than commrt.
        """
        if backend != NAME:
            raise as_dist_error(
                UsageError(f"a group over {backend} of one that is reconfigured: leave backend out")
            )
        if self.rank() not in ranks:
            return None
        try:
            own = self._own.derived(ranks, timeout, group_name)
        except CommrtError as error:
            raise as_dist_error(error) from error.__cause__
        group = ProcessGroup(self._own.group.store, ranks.index(self.rank()), len(ranks))
        use_backend(group, own)
        group._set_group_name(group_name)  # noqa: SLF001  # as torch does
        group._set_group_desc(group_desc or "undefined")  # noqa: SLF001
        return group

    def rank(self) -> int:
        """Return this process's rank."""
        return self._own.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return self._own.size()

    # C++'s names
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815
