# SPDX-License-Identifier: Apache-2.0
"""Check that a transport keeps the rules of `commrt.transport.protocol`: each check is one rule.

With pytest::

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=conformance.name)
    def test_my_transport(check):
        check(lambda ranks, timeout_s: [MyTransport(...) for rank in range(ranks)])

Each rank runs its groups on one thread at a time. Transports are aborted and closed from others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import isfunction, signature
from multiprocessing import get_context
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from commrt.errors import DeadlineExceeded, TransportClosed, TransportError, UsageError
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport

Make = Callable[[int, float], Sequence[Transport]]
"""(ranks, timeout_s) -> a new world's transports, by rank; may connect in threads of its own."""
Check = Callable[[Make], None]
T = TypeVar("T")
Error = TypeVar("Error", bound=BaseException)
Ends = Sequence[tuple[int, Tensor]]
"""(peer, data) of each message."""

LONG_S = 30.0
SHORT_S = 0.5
NOW = Tag(step=7, bucket=3)


def name(check: Check) -> str:
    """Return the rule that `check` checks, as words."""
    return check.__name__.replace("_", " ")


def a_ring_of_five_turns(make: Make) -> None:
    """Each rank sends right and receives from the left, a hundred times with one bound group."""

    def body(t: Transport) -> float:
        held = torch.tensor([float(t.rank)])
        arriving = torch.empty(1)
        turn = _bind(t, [((t.rank + 1) % 5, held)], [((t.rank - 1) % 5, arriving)])
        for _ in range(100):
            turn(NOW)
            held.copy_(arriving)
        return held.item()

    _require(
        _on_all(make(5, LONG_S), body) == [0.0, 1.0, 2.0, 3.0, 4.0], "values came out of order"
    )


def transfers_of_a_pair_keep_their_order(make: Make) -> None:
    """The k-th send matches the k-th receive, within a group and from one group to the next."""

    def body(t: Transport) -> list[float]:
        data = [torch.full((8,), float(i)) if t.rank == 0 else torch.empty(8) for i in range(6)]
        for part in (data[:4], data[4:]):
            _one_way(t, *part)(NOW)
        return [each[0].item() for each in data]

    _require(
        _on_all(make(2, LONG_S), body)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "transfers overtook each other",
    )


def peers_progress_independently(make: Make) -> None:
    """Three ranks swap in one group, naming peers in different orders; none waits for ever."""

    def body(t: Transport) -> list[float]:
        others = [(t.rank + k) % 3 for k in (1, 2)]
        landing = {peer: torch.empty(2000) for peer in others}
        sends = [(peer, torch.full((2000,), float(t.rank))) for peer in others]
        _bind(t, sends, [(peer, landing[peer]) for peer in reversed(others)])(NOW)
        return [landing[peer].sum().item() / 2000 for peer in sorted(others)]

    _require(_on_all(make(3, LONG_S), body) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]], "wrong sender")


def every_dtype_arrives_bit_by_bit(make: Make) -> None:
    """A transport moves bytes, whatever their values are."""
    values = [
        torch.tensor([float("nan"), -0.0, 1e-40]),
        torch.tensor([1.5, -3.0]).to(torch.bfloat16),
        torch.tensor([1e-7, 65504.0]).to(torch.float16),
        torch.tensor([2**62, -1]),
        torch.arange(7, dtype=torch.uint8),
    ]

    def body(t: Transport) -> list[bytes]:
        data = values if t.rank == 0 else [torch.zeros_like(value) for value in values]
        for each in data:
            _one_way(t, each)(NOW)
        return [each.view(torch.uint8).numpy().tobytes() for each in data]

    sent, arrived = _on_all(make(2, LONG_S), body)
    _require(sent == arrived, "bits changed on the way")


def a_send_reads_when_it_runs(make: Make) -> None:
    """Binding reads addresses, running reads contents."""

    def body(t: Transport) -> float:
        data = torch.zeros(3)
        run = _one_way(t, data)
        data.fill_(5.0 if t.rank == 0 else -1.0)
        run(NOW)
        return data.sum().item()

    _require(_on_all(make(2, LONG_S), body) == [15.0, 15.0], "the send was read too early")


def parts_of_a_buffer_travel_alone(make: Make) -> None:
    """A view is sent from where it begins, and memory beside a received view stays as it is."""

    def body(t: Transport) -> list[float]:
        buffer = torch.arange(10.0) if t.rank == 0 else torch.zeros(10)
        _one_way(t, buffer[3:7])(NOW)
        return buffer.tolist()

    arrived = _on_all(make(2, LONG_S), body)[1]
    _require(arrived == [0, 0, 0, 3, 4, 5, 6, 0, 0, 0], f"got {arrived}")


def what_is_only_read_stays_until_it_was_read(make: Make) -> None:
    """A sender may overwrite what it sent once its group ends, even if it is read in place."""

    def body(t: Transport) -> list[float]:
        mine = torch.zeros(8)
        theirs = torch.zeros(8)
        large = t.allocate(40_000, torch.float32)
        received = t.allocate(40_000, torch.float32)
        right = (t.rank + 1) % 3
        left = (t.rank - 1) % 3
        sends = [P2PMessage(right, data) for data in (mine, large)]
        recvs = [P2PMessage(left, data) for data in (theirs, received)]
        run = t.bind(P2PGroup(sends, recvs, reads=True))
        sums = []
        for turn in range(20):
            mine.fill_(turn)
            large.fill_(turn)
            return_borrowed = run(Tag(turn, 0))
            sums.append(float(theirs.sum() + received.sum()) / 40_008)
            if return_borrowed is not None:
                return_borrowed()
        return sums

    for rank, sums in enumerate(_on_all(make(3, LONG_S), body)):
        _require(sums == list(range(20)), f"rank {rank} read {sums[:5]} ...")


def empty_messages_and_groups_are_dropped(make: Make) -> None:
    """A group returns although nobody receives its empty send."""

    def body(t: Transport) -> None:
        _bind(t)(NOW)
        _bind(t, [(1, torch.empty(0))] if t.rank == 0 else [])(NOW)

    _on_all(_impatient(make, 2), body)


def a_transfer_to_self_is_a_copy(make: Make) -> None:
    """A rank's messages to itself are copied in order."""

    def body(t: Transport) -> list[float]:
        sources = [torch.tensor([float(i)]) for i in (1, 2)]
        targets = [torch.empty(1) for _ in range(2)]
        _bind(t, [(t.rank, data) for data in sources], [(t.rank, data) for data in targets])(NOW)
        return [target.item() for target in targets]

    _require(
        _on_all(_impatient(make, 2), body) == [[1.0, 2.0]] * 2,
        "self transfers were lost or swapped",
    )


def half_a_self_transfer_and_an_unknown_peer_are_refused(make: Make) -> None:
    """Binding a send to oneself without its receive, or to an unknown rank, raises `UsageError`."""
    transport = _impatient(make, 2)[0]
    for peer in (0, 2):
        _raises(UsageError, partial(_bind, transport, [(peer, torch.ones(1))]))


def a_silent_peer_ends_in_a_deadline_that_names_it(make: Make) -> None:
    """The error carries rank, peer, step, bucket, hop and bytes, and comes in time."""
    transports = _impatient(make, 3)
    run = _bind(transports[0], recvs=[(2, torch.empty(5))], hop=4)
    begin = monotonic()
    place = _raises(DeadlineExceeded, lambda: run(NOW)).place
    _require(
        SHORT_S * 0.8 <= monotonic() - begin < SHORT_S * 8, f"it took {monotonic() - begin:.2f} s"
    )
    got = (place.rank, place.peer, place.step, place.bucket, place.hop, place.nbytes)
    _require(got == (0, 2, 7, 3, 4, 20), f"it names {place}")


def a_send_that_nobody_takes_ends_in_a_deadline_that_says_its_bytes(make: Make) -> None:
    """The error names the peer and the bytes of what was sent."""
    transports = _impatient(make, 2)
    run = _bind(transports[0], [(1, torch.ones(100_000))])
    place = _raises(DeadlineExceeded, lambda: run(NOW)).place
    _require((place.peer, place.nbytes) == (1, 400_000), f"it names {place}")


def a_deadline_may_be_changed_between_groups(make: Make) -> None:
    """Ranks can connect with a long timeout, and train with a short one."""
    transports = make(2, LONG_S)
    run = _bind(transports[0], recvs=[(1, torch.empty(5))])
    transports[0].timeout_s = SHORT_S
    begin = monotonic()
    error = _raises(DeadlineExceeded, lambda: run(NOW))
    _require(monotonic() - begin < LONG_S / 2, "it kept the old one")
    _require(f"within {SHORT_S:g} s" in str(error), f"it says {error}")


def an_aborted_peer_releases_ranks_that_wait(make: Make) -> None:
    """Their error names the peer, and comes long before the deadline."""
    _require_released(make, lambda transport: transport.abort())


def a_closed_peer_releases_ranks_that_wait(make: Make) -> None:
    """A close has this effect even if a group bound on the transport is still referenced."""
    _require_released(make, lambda transport: transport.close())


def _require_released(make: Make, leave: Callable[[Transport], None]) -> None:
    transports = make(2, LONG_S)
    run = _bind(transports[0], recvs=[(1, torch.empty(5))])
    held = _bind(transports[1], [(0, torch.ones(5))])
    error = _error_of_waiting(run, lambda: leave(transports[1]))
    _require(
        isinstance(error, TransportError) and error.place.peer == 1,
        f"expected one that names 1, got {error!r}",
    )
    _raises(TransportClosed, lambda: held(NOW))


def an_abort_ends_the_group_that_is_running(make: Make) -> None:
    """An abort from another thread does not wait for the deadline."""
    transports = make(2, LONG_S)  # both stay referenced, or the peer would be lost
    run = _bind(transports[0], recvs=[(1, torch.empty(5))])
    error = _error_of_waiting(run, transports[0].abort)
    _require(isinstance(error, TransportClosed), f"expected TransportClosed, got {error!r}")


def _error_of_waiting(run: Exchange, end: Callable[[], None]) -> BaseException | None:
    """Return the error of `run` on a thread after `end()`; fails if that waits for the deadline."""
    begin = monotonic()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, NOW)
        end()
        error = running.exception()
    _require(monotonic() - begin < LONG_S / 2, "it waited for the deadline")
    return error


def what_was_sent_arrives_though_the_sender_closes(make: Make) -> None:
    """A rank may close its transport before its peer has read the last message."""

    def body(t: Transport) -> bool:
        data = torch.full((100_000,), 3.0) if t.rank == 0 else torch.zeros(100_000)
        _one_way(t, data)(NOW)
        t.close()
        return bool((data == 3.0).all())

    for _ in range(20):
        _require(_on_all(make(2, LONG_S), body) == [True, True], "the end of it was lost")


def a_closed_transport_refuses(make: Make) -> None:
    """A group raises `TransportClosed`, bound before or not.

    Closing again is fine, and allocated memory stays.
    """
    transport = _impatient(make, 2)[0]
    run = _bind(transport, [(1, torch.ones(1))])
    kept = transport.allocate(3, torch.float32)
    for leave in (transport.close, transport.close, transport.abort):
        leave()
        _raises(TransportClosed, lambda: run(NOW))
        _raises(TransportClosed, lambda: _bind(transport, [(1, torch.ones(1))])(NOW))
    _require(kept.add_(1.0).tolist() == [1.0] * 3, "memory was lost")


def a_forked_child_takes_nothing_from_its_parent(make: Make) -> None:
    """A child that closes what it inherited, and ends, leaves the parent's connections alone."""
    transports = make(2, LONG_S)

    def close_all() -> None:
        for transport in transports:
            transport.close()

    child = get_context("fork").Process(target=close_all, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which a child does not have
        child.start()
    child.join(LONG_S / 2)
    child.kill()
    child.join()
    _require(child.exitcode == 0, f"the child could not close them: {child.exitcode}")

    def body(t: Transport) -> float:
        data = torch.full((10_000,), 2.0 - t.rank)
        _one_way(t, data)(NOW)
        return data.mean().item()

    _require(
        _on_all(transports, body) == [2.0, 2.0], "the child has changed what the parent receives"
    )


def sizes_that_differ_never_pass_for_success(make: Make) -> None:
    """At least the receiver gets an error, at the latest by the deadline."""
    _require(
        _fails_at_receiver(_impatient(make, 2), [4, 5], [NOW, NOW]), "4 elements were taken for 5"
    )


def calls_that_differ_never_pass_for_success(make: Make) -> None:
    """The receiver gets an error by the deadline, where messages carry their call's number."""
    transports = _impatient(make, 2)
    fails = _fails_at_receiver(transports, [4, 4], [NOW._replace(call=rank) for rank in range(2)])
    # which has no room
    _require(fails or "nccl" in transports[1].kind, "one call was taken for another")


def _fails_at_receiver(
    transports: Sequence[Transport], numels: Sequence[int], tags: Sequence[Tag]
) -> bool:
    def body(t: Transport) -> bool:
        try:
            _one_way(t, torch.ones(numels[t.rank]))(tags[t.rank])
        except TransportError:
            return True
        return False

    return _on_all(transports, body)[1]


CHECKS: tuple[Check, ...] = tuple(
    value
    for value in list(globals().values())
    if isfunction(value) and [*signature(value).parameters] == ["make"]
)
"""All checks, in order: the functions of this module that take `make` alone."""


def _bind(transport: Transport, sends: Ends = (), recvs: Ends = (), hop: int = 0) -> Exchange:
    return transport.bind(
        P2PGroup([P2PMessage(*end) for end in sends], [P2PMessage(*end) for end in recvs], hop)
    )


def _one_way(transport: Transport, *data: Tensor) -> Exchange:
    """Bind transfers from rank 0 to rank 1."""
    ends = [(1 - transport.rank, each) for each in data]
    return _bind(transport, ends) if transport.rank == 0 else _bind(transport, recvs=ends)


def _impatient(make: Make, ranks: int) -> Sequence[Transport]:
    """Return transports that wait for a peer for `SHORT_S`, once they are connected."""
    transports = make(ranks, LONG_S)
    for transport in transports:
        transport.timeout_s = SHORT_S
    return transports


def _on_all(transports: Sequence[Transport], body: Callable[[Transport], T]) -> list[T]:
    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(body, transports))


def _raises(kind: type[Error], act: Callable[[], object]) -> Error:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
