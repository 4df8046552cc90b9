# SPDX-License-Identifier: Apache-2.0
"""The life of an NCCL communicator: CuPy's binding, how ranks create one, and how they notice that
one ends.

All ranks meet on the store before they call NCCL: a call that waits inside NCCL for a missing rank
has no deadline and cannot be interrupted. Ranks that shut down leave a notice on the store, because
NCCL does not tell the others.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportError, UsageError
from commrt.nccl_groups import MOST_MESSAGES, joined
from commrt.store.client import call_store, clone_connection
from commrt.store.disagreement import find_disagreement
from commrt.store.launcher import variable
from commrt.store.parsing import MALFORMED, parse_int, typed
from commrt.store.records import gather
from commrt.threads.calls import start_call
from commrt.threads.deadline import clock
from commrt.threads.future import Future
from commrt.threads.streams import Streams
from commrt.transport.protocol import P2PGroup, P2PMessage

SHARES_GPUS = 23003
"""The first NCCL whose ranks can share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1."""

CHECK_INTERVAL_S = 0.05
READ_INTERVAL_S = 0.5
"""Between two reads of the notices: a GPU that is behind its host is not late, and all ranks read
from one store.
"""
OLD_CUPY = (
    "this CuPy is older than 14, whose ids of communicators differ: pip install 'cupy-cuda13x>=14'"
)

Binding = Any
"""The module ``cupy.cuda.nccl``, which has no types; `tests/support/nccl_stand_in.py` has what is
used of it.
"""
Communicator = Any
"""Its ``NcclCommunicator``: one rank's end, used by one thread at a time, but for
`check_async_error` and `abort`.
"""


def load() -> Binding:
    """Return CuPy's binding of the NCCL that torch has loaded before; raises `UsageError` if it
    cannot be used.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what CuPy warns of is an error below
            from cupy.cuda import nccl  # noqa: PLC0415  # slow to import, and absent without a GPU
    except ImportError as error:
        raise UsageError(
            f"GPUs exchange through CuPy, which cannot be imported ({error}): pip install"
            " cupy-cuda13x"
        ) from error
    require_usable(nccl)
    return nccl


def require_usable(binding: Binding) -> None:
    """Raise `UsageError` for an NCCL that would fail later,
    with an error that is harder to read.
    """
    if not binding.available:
        raise UsageError(
            "CuPy finds no NCCL library: install the one of your torch, such as pip install"
            " nvidia-nccl-cu13"
        )
    if variable("NCCL_COMM_BLOCKING") == "0":
        raise UsageError(
            "NCCL_COMM_BLOCKING=0 makes calls return before they are done, which CuPy takes for an"
            " error: unset it"
        )
    runtime = binding.get_version()
    built = binding.get_build_version()
    if runtime < built:
        raise UsageError(
            f"NCCL {named(runtime)} was loaded, and CuPy was built with {named(built)}: upgrade"
            " nvidia-nccl"
        )


def named(version: int) -> str:
    """Return ``2.28.9`` for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def create(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    streams: Streams,
    binding: Binding,
) -> Communicator:
    """Return the communicator of `members`, on `device`.

    Raises `DeadlineExceeded` with the ranks that did not come, `DisagreementError` if they run
    different NCCLs, `UsageError` if two chose the same GPU, `TransportError` for an error of NCCL.
    """
    made = ""
    failure = None
    if rank == members[0]:
        try:
            made = binding.get_unique_id().hex()
        except (
            Exception
        ) as error:  # the others must learn of it; ids of older CuPys are tuples, without `hex`
            failure = UsageError(OLD_CUPY) if isinstance(error, AttributeError) else error
    own = _RankInfo(binding.get_version(), _gpu(device), made)
    infos = gather(store, rank, members, own, timeout_s, _parse_info)
    claims = {peer: {"the version of NCCL": named(info.nccl)} for peer, info in infos.items()}
    if mismatch := find_disagreement("connect", claims):
        raise mismatch
    _require_a_gpu_each(infos)
    if failure is not None:
        raise failure
    unique_id = bytes.fromhex(infos[members[0]].unique_id)
    if not unique_id:
        what = f"rank {members[0]} could not make a communicator: look at its output"
        raise PeerLost(what, Place(rank, members[0]))

    def construct() -> Communicator:
        streams.use()
        return binding.NcclCommunicator(len(members), unique_id, members.index(rank))

    try:
        return start_call(construct).result(timeout_s)
    except TimeoutError as error:
        what = (
            f"all ranks came, but NCCL did not connect them within {timeout_s:g} s: run with"
            " NCCL_DEBUG=INFO"
        )
        raise DeadlineExceeded(what, Place(rank)) from error
    except RuntimeError as error:
        raise TransportError(
            f"NCCL made no communicator ({error}): run with NCCL_DEBUG=WARN", Place(rank)
        ) from error


class _RankInfo(NamedTuple):
    """What a rank tells the others before they create a communicator."""

    nccl: int
    """Version."""
    gpu: str | None
    """Identifies its GPU among those of all hosts."""
    unique_id: str
    """The id of the communicator in hexadecimal, if the first rank says this."""


def _gpu(device: torch.device) -> str | None:
    """Return the GPU's name among all hosts; where NCCL_HOSTID is set, NCCL takes that for the
    host.
    """
    if device.type != "cuda":
        return None
    return f"{variable('NCCL_HOSTID')} {torch.cuda.get_device_properties(device).uuid}"


def _parse_info(data: bytes) -> _RankInfo:
    info = _RankInfo(*typed(json.loads(data), int, str | None, str))
    bytes.fromhex(info.unique_id)  # raises
    return info


def _require_a_gpu_each(infos: Mapping[int, _RankInfo]) -> None:
    if (
        next(iter(infos.values())).nccl >= SHARES_GPUS
        and variable("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    ):
        return
    owners: dict[str, int] = {}
    for rank, info in infos.items():
        if info.gpu is not None and (owner := owners.setdefault(info.gpu, rank)) != rank:
            raise UsageError(
                f"ranks {owner} and {rank} chose the same GPU, {info.gpu}: move each model to its"
                " rank's world.device before it is attached"
            )


def watch(check: Callable[[], None], begin: Callable[[], None]) -> threading.Event:
    """Call `begin`, then the method `check` every `CHECK_INTERVAL_S`, on a thread, until its object
    is collected.

    Returns the event that ends it too; a check that is running goes on.
    """
    method = WeakMethod(check)
    stopped = threading.Event()
    threading.Thread(
        target=_watch, args=(method, begin, stopped), name="commrt-watchdog", daemon=True
    ).start()
    return stopped


def _watch(
    method: WeakMethod[Callable[[], None]], begin: Callable[[], None], stopped: threading.Event
) -> None:
    begin()
    while not stopped.wait(CHECK_INTERVAL_S):
        if (check := method()) is None:
            return
        check()
        del check  # or its object would live until the next check


Counts = dict[int, int] | None
"""Groups that a rank had begun with each peer when it closed; None for a rank that gave up."""


class ShutdownNotices:
    """Notices on the store of ranks that shut down their communicator, for ranks that still wait
    for them.

    A rank that closed has done its part in all groups that it counts. A rank that gave up has not,
    and counts none.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = clone_connection(store)
        self._rank = rank
        self._known: dict[int, Counts] = {}
        self._asked: set[int] = set()
        """Peers that were asked about since the last read began: the next one covers them all."""
        self._reading: Future[None] | None = None
        self._next_read_s = 0.0

    def announce(self, counts: Counts) -> None:
        """Tell the others that this rank shuts down. Waits for 2 s at most."""
        # the store is gone, and the other ranks with it
        with suppress(RuntimeError, TransportError):
            call_store(lambda: self._store.set(f"left/{self._rank}", json.dumps(counts)))

    def left_early(self, begun: Mapping[int, int]) -> int | None:
        """Return a peer that is known to have left without its part in what was `begun` with it;
        None if none has.

        Never waits: another thread reads the store.
        """
        self._asked.update(begun)
        if (self._reading is None or self._reading.done()) and clock.now_s() >= self._next_read_s:
            self._next_read_s = clock.now_s() + READ_INTERVAL_S
            asked = self._asked
            self._asked = set()
            self._reading = start_call(lambda: self._read(asked))
        known = ((peer, self._known[peer]) for peer in begun if peer in self._known)
        return next(
            (
                peer
                for peer, counts in known
                if counts is None or counts.get(self._rank, 0) < begun[peer]
            ),
            None,
        )

    def _read(self, peers: Collection[int]) -> None:
        for peer in peers:
            if self._store.check([key := f"left/{peer}"]):
                with suppress(*MALFORMED):  # a malformed notice is none
                    self._known[peer] = _parse_counts(self._store.get(key))


def _parse_counts(data: bytes) -> Counts:
    counts = json.loads(data)
    return (
        None if counts is None else {int(peer): parse_int(count) for peer, count in counts.items()}
    )


def uncut(group: P2PGroup, rank: int, members: Sequence[int]) -> list[P2PGroup]:
    """Return the messages of `group` as groups that NCCL never cuts, in an order that is the same
    on all `members`.

    A hop's messages say where they belong. Many without a schedule, as of ``batch_isend_irecv``,
    are sent by distance.
    """
    count = len(group.sends) + len(group.recvs)
    if count > MOST_MESSAGES and all(each.group is None for each in (*group.sends, *group.recvs)):
        group = _by_distance(group, members.index(rank), members)
    found = defaultdict[tuple[int, int], tuple[list[P2PMessage], list[P2PMessage]]](
        lambda: ([], [])
    )
    for side, messages in enumerate((group.sends, group.recvs)):
        for each in messages:
            key = (0, 0) if each.group is None else joined(each.group, each.data.nbytes)
            found[key][side].append(each)
    in_order = sorted(found.items(), key=itemgetter(0))
    return [replace(group, sends=sends, recvs=recvs) for _, (sends, recvs) in in_order]


def _by_distance(group: P2PGroup, place: int, members: Sequence[int]) -> P2PGroup:
    """Return the same messages in groups that both ends know: all first messages of pairs, then all
    second ones, ...
    """

    def grouped(messages: Sequence[P2PMessage], sign: int) -> Iterator[P2PMessage]:
        before: Counter[int] = Counter()  # messages of each peer
        for each in messages:
            of_distance = sign * (members.index(each.peer) - place) % len(members) // MOST_MESSAGES
            yield each._replace(
                group=before[each.peer] * (len(members) // MOST_MESSAGES + 1) + of_distance
            )
            before[each.peer] += 1

    return replace(group, sends=[*grouped(group.sends, 1)], recvs=[*grouped(group.recvs, -1)])
