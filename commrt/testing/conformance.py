# SPDX-License-Identifier: Apache-2.0
"""What every transport must do. Give each check a way to make transports, and it exercises one rule.

With pytest::

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=conformance.name)
    def test_my_transport(check):
        check(lambda ranks, timeout_s: [MyTransport(...) for rank in range(ranks)])

The transports of one world are used from one thread each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from commrt.errors import DeadlineExceeded, TransportClosed, TransportError, UsageError
from commrt.transport.protocol import Group, Moment, Parcel, Transport

__all__ = ["CHECKS", "Check", "Make", "name"]

Make = Callable[[int, float], Sequence[Transport]]
"""(ranks, timeout_s) -> the transports of a new world, by rank; may connect in threads of its own."""
Check = Callable[[Make], None]
T = TypeVar("T")

PATIENT_S = 30.0
SHORT_S = 0.5
NOW = Moment(step=7, bucket=3)


def name(check: Check) -> str:
    """The rule as words."""
    return check.__name__.replace("_", " ")


def a_pair_swaps_in_one_group(make: Make) -> None:
    """Both ends send and receive in one group, which would deadlock one after the other."""

    def body(t: Transport) -> Tensor:
        mine, theirs = torch.full((1000,), float(t.rank)), torch.empty(1000)
        t.bind(Group([Parcel(1 - t.rank, mine)], [Parcel(1 - t.rank, theirs)]))(NOW)
        return theirs

    for rank, got in enumerate(_on_all(make(2, PATIENT_S), body)):
        _require(bool((got == 1 - rank).all()), f"rank {rank} got {got[:3].tolist()}")


def a_ring_of_five_turns(make: Make) -> None:
    """Everybody sends right and receives from the left, a hundred times with one binding."""

    def body(t: Transport) -> float:
        held, arriving = torch.tensor([float(t.rank)]), torch.empty(1)
        turn = t.bind(Group([Parcel((t.rank + 1) % 5, held)], [Parcel((t.rank - 1) % 5, arriving)]))
        for _ in range(100):
            turn(NOW)
            held.copy_(arriving)
        return held.item()

    _require(_on_all(make(5, PATIENT_S), body) == [0.0, 1.0, 2.0, 3.0, 4.0], "values came out of order")


def transfers_of_a_pair_keep_their_order(make: Make) -> None:
    """The k-th send meets the k-th receive, within a group and from one group to the next."""

    def body(t: Transport) -> list[float]:
        parcels = [Parcel(1 - t.rank, torch.full((8,), float(i)) if t.rank == 0 else torch.empty(8)) for i in range(6)]
        for part in (parcels[:4], parcels[4:]):
            t.bind(Group(part, []) if t.rank == 0 else Group([], part))(NOW)
        return [parcel.data[0].item() for parcel in parcels]

    _require(_on_all(make(2, PATIENT_S), body)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "transfers overtook each other")


def peers_progress_independently(make: Make) -> None:
    """Three ranks name their peers in different orders within one group; nobody waits for ever."""

    def body(t: Transport) -> list[float]:
        others = [(t.rank + k) % 3 for k in (1, 2)]
        landing = {peer: torch.empty(2000) for peer in others}
        sends = [Parcel(peer, torch.full((2000,), float(t.rank))) for peer in others]
        t.bind(Group(sends, [Parcel(peer, landing[peer]) for peer in reversed(others)]))(NOW)
        return [landing[peer].sum().item() / 2000 for peer in sorted(others)]

    _require(_on_all(make(3, PATIENT_S), body) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]], "wrong sender")


def every_dtype_arrives_bit_by_bit(make: Make) -> None:
    """A transport moves bytes; it does not look at them."""
    values = [
        torch.tensor([float("nan"), -0.0, 1e-40]),
        torch.tensor([1.5, -3.0]).to(torch.bfloat16),
        torch.tensor([1e-7, 65504.0]).to(torch.float16),
        torch.tensor([2**62, -1]),
        torch.arange(7, dtype=torch.uint8),
    ]

    def body(t: Transport) -> list[bytes]:
        landing = [torch.zeros_like(value) for value in values]
        for value, place in zip(values, landing, strict=True):
            t.bind(Group([Parcel(1, value)], []) if t.rank == 0 else Group([], [Parcel(0, place)]))(NOW)
        return [place.view(torch.uint8).numpy().tobytes() for place in landing]

    expected = [value.view(torch.uint8).numpy().tobytes() for value in values]
    _require(_on_all(make(2, PATIENT_S), body)[1] == expected, "bits changed on the way")


def a_send_reads_when_it_runs(make: Make) -> None:
    """Binding looks at addresses, running at contents."""

    def body(t: Transport) -> float:
        data = torch.zeros(3)
        exchange = t.bind(Group([Parcel(1, data)], []) if t.rank == 0 else Group([], [Parcel(0, data)]))
        data.fill_(5.0 if t.rank == 0 else -1.0)
        exchange(NOW)
        return data.sum().item()

    _require(_on_all(make(2, PATIENT_S), body) == [15.0, 15.0], "the send was read too early")


def parts_of_a_buffer_travel_alone(make: Make) -> None:
    """What is sent is where the tensor begins, not where its memory does; what lies beside a receive stays."""

    def body(t: Transport) -> list[float]:
        buffer = torch.arange(10.0) if t.rank == 0 else torch.zeros(10)
        parcel = Parcel(1 - t.rank, buffer[3:7])
        t.bind(Group([parcel], []) if t.rank == 0 else Group([], [parcel]))(NOW)
        return buffer.tolist()

    arrived = _on_all(make(2, PATIENT_S), body)[1]
    _require(arrived == [0, 0, 0, 3, 4, 5, 6, 0, 0, 0], f"got {arrived}")


def empty_parcels_and_groups_are_nothing(make: Make) -> None:
    """Both ends know that a transfer is empty, so it needs no wire."""

    def body(t: Transport) -> None:
        t.bind(Group([], []))(NOW)
        t.bind(Group([Parcel(1, torch.empty(0))] if t.rank == 0 else [], []))(NOW)

    _on_all(make(2, SHORT_S), body)


def a_transfer_to_self_is_a_copy(make: Make) -> None:
    """In order, beside transfers to others."""

    def body(t: Transport) -> list[float]:
        sources, targets = [torch.tensor([float(i)]) for i in (1, 2)], [torch.empty(1) for _ in range(2)]
        own = [Parcel(t.rank, data) for data in sources], [Parcel(t.rank, data) for data in targets]
        t.bind(Group(*own))(NOW)
        return [target.item() for target in targets]

    _require(_on_all(make(2, SHORT_S), body) == [[1.0, 2.0]] * 2, "self transfers were lost or swapped")


def half_a_self_transfer_is_refused(make: Make) -> None:
    """On NCCL it is an invalid usage; here it is a sentence."""
    transport = make(2, SHORT_S)[0]
    _raises(UsageError, lambda: transport.bind(Group([Parcel(0, torch.ones(1))], [])))


def a_stranger_is_refused(make: Make) -> None:
    """Binding to a rank that does not exist fails at once."""
    transport = make(2, SHORT_S)[0]
    _raises(UsageError, lambda: transport.bind(Group([Parcel(2, torch.ones(1))], [])))


def a_silent_peer_ends_in_a_deadline_that_names_it(make: Make) -> None:
    """The error carries rank, peer, step, bucket, hop and bytes, and comes in time."""
    transports = make(3, SHORT_S)
    exchange = transports[0].bind(Group([], [Parcel(2, torch.empty(5))], hop=4))
    begin = monotonic()
    error = _raises(DeadlineExceeded, lambda: exchange(NOW))
    _require(SHORT_S * 0.8 <= monotonic() - begin < SHORT_S * 8, f"it took {monotonic() - begin:.2f} s")
    place = error.place
    got = (place.rank, place.peer, place.step, place.bucket, place.hop, place.nbytes)
    _require(got == (0, 2, 7, 3, 4, 20), f"it names {place}")


def a_deadline_may_be_changed_between_exchanges(make: Make) -> None:
    """Ranks connect with patience, and take their steps with less."""
    transports = make(2, PATIENT_S)
    exchange = transports[0].bind(Group([], [Parcel(1, torch.empty(5))]))
    transports[0].timeout_s = SHORT_S
    begin = monotonic()
    error = _raises(DeadlineExceeded, lambda: exchange(NOW))
    _require(monotonic() - begin < PATIENT_S / 2, "it kept the old one")
    _require(f"within {SHORT_S:g} s" in str(error), f"it says {error}")


def an_aborted_peer_releases_those_who_wait(make: Make) -> None:
    """Long before the deadline, with an error that names it."""
    _require_released(make, lambda transport: transport.abort())


def a_closed_peer_releases_those_who_wait(make: Make) -> None:
    """Also while somebody holds what was bound on it."""
    _require_released(make, lambda transport: transport.close())


def _require_released(make: Make, leave: Callable[[Transport], None]) -> None:
    transports = make(2, PATIENT_S)
    exchange = transports[0].bind(Group([], [Parcel(1, torch.empty(5))]))
    held = transports[1].bind(Group([Parcel(0, torch.ones(5))], []))
    begin = monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchange, NOW)
        leave(transports[1])
        error = waiting.exception()
    _require(isinstance(error, TransportError) and error.place.peer == 1, f"expected one that names 1, got {error!r}")
    _require(monotonic() - begin < PATIENT_S / 2, "it waited for the deadline")
    _raises(TransportClosed, lambda: held(NOW))


def an_abort_ends_the_exchange_that_is_running(make: Make) -> None:
    """Called from another thread, it does not wait for the deadline."""
    transports = make(2, PATIENT_S)
    exchange = transports[0].bind(Group([], [Parcel(1, torch.empty(5))]))
    begin = monotonic()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(exchange, NOW)
        transports[0].abort()
        error = running.exception()
    _require(isinstance(error, TransportClosed), f"expected TransportClosed, got {error!r}")
    _require(monotonic() - begin < PATIENT_S / 2, "it waited for the deadline")


def what_was_sent_arrives_though_the_sender_closes(make: Make) -> None:
    """A rank may be done, and leave, before its peer has read the last transfer."""

    def body(t: Transport) -> bool:
        data = torch.full((100_000,), 3.0) if t.rank == 0 else torch.zeros(100_000)
        t.bind(Group([Parcel(1, data)], []) if t.rank == 0 else Group([], [Parcel(0, data)]))(NOW)
        t.close()
        return bool((data == 3.0).all())

    for _ in range(20):
        _require(_on_all(make(2, PATIENT_S), body) == [True, True], "the end of it was lost")


def a_closed_transport_refuses(make: Make) -> None:
    """Closing twice is fine; using it after is an error of its own kind."""
    transport = make(2, SHORT_S)[0]
    exchange = transport.bind(Group([Parcel(1, torch.ones(1))], []))
    transport.close()
    transport.close()
    _raises(TransportClosed, lambda: exchange(NOW))


def sizes_that_differ_never_pass_for_success(make: Make) -> None:
    """The receiver at least gets an error, at the latest by the deadline."""

    def body(t: Transport) -> bool:
        mine = Group([Parcel(1, torch.ones(4))], []) if t.rank == 0 else Group([], [Parcel(0, torch.zeros(5))])
        try:
            t.bind(mine)(NOW)
        except TransportError:
            return True
        return False

    _require(_on_all(make(2, SHORT_S), body)[1], "4 elements were taken for 5")


CHECKS: tuple[Check, ...] = (
    a_pair_swaps_in_one_group,
    a_ring_of_five_turns,
    transfers_of_a_pair_keep_their_order,
    peers_progress_independently,
    every_dtype_arrives_bit_by_bit,
    a_send_reads_when_it_runs,
    parts_of_a_buffer_travel_alone,
    empty_parcels_and_groups_are_nothing,
    a_transfer_to_self_is_a_copy,
    half_a_self_transfer_is_refused,
    a_stranger_is_refused,
    a_silent_peer_ends_in_a_deadline_that_names_it,
    a_deadline_may_be_changed_between_exchanges,
    an_aborted_peer_releases_those_who_wait,
    a_closed_peer_releases_those_who_wait,
    an_abort_ends_the_exchange_that_is_running,
    what_was_sent_arrives_though_the_sender_closes,
    a_closed_transport_refuses,
    sizes_that_differ_never_pass_for_success,
)


def _on_all(transports: Sequence[Transport], body: Callable[[Transport], T]) -> list[T]:
    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(body, transports))


Err = TypeVar("Err", bound=BaseException)


def _raises(kind: type[Err], act: Callable[[], object]) -> Err:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
