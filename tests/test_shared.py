# SPDX-License-Identifier: Apache-2.0
"""Shared memory: nothing is copied twice or left behind, and no rank waits for one that is gone."""

import errno
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import rendezvous_ranks
import torch
from torch.distributed import HashStore
from transports import shared

from commrt.errors import CallMismatch, DeadlineExceeded, PeerLost, SizeMismatch, TransportClosed, TransportError
from commrt.testing.processes import run_processes
from commrt.transport import arena, channel, local_sockets, packet_wait
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag
from commrt.transport.shared import SharedTransport

NOW = Tag(step=7, bucket=3)
PATIENT_S = 60.0
LARGE = channel.SMALL_NBYTES // 4 + 1
"""So many numbers are offered where they lie; fewer travel in a packet."""


@pytest.fixture
def pair():
    transports = shared(2, PATIENT_S)
    yield transports
    for transport in transports:
        transport.close()


def both(pair, groups):
    """Run one group per rank; what each raised."""

    def run(transport, group):
        transport.bind(group)(NOW)

    with ThreadPoolExecutor(2) as pool:
        return [future.exception() for future in list(map(pool.submit, [run, run], pair, groups))]


def sending(*rows):
    return P2PGroup([P2PMessage(1, row) for row in rows], [])


def receiving(*rows, reads=False):
    return P2PGroup([], [P2PMessage(0, row) for row in rows], reads=reads)


def swapping(rank, sent, landing):
    return P2PGroup([P2PMessage(1 - rank, row) for row in sent], [P2PMessage(1 - rank, row) for row in landing])


def across(pair, data, landing):
    return both(pair, [sending(data), receiving(landing)])


def sockets(transport):
    """The descriptors that `transport` talks on, and what they refer to."""
    open_ones = [each._socket.fileno() for each in transport._channels.values() if each._socket.fileno() >= 0]
    return [(descriptor, os.fstat(descriptor).st_ino) for descriptor in open_ones]


def descriptors():
    return [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def shared_memory():
    """The numbers of mappings and of descriptors of segments in this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return tuple(
        sum("/memfd:commrt-packets" not in line and "/memfd:commrt" in line for line in lines)
        for lines in (maps, descriptors())
    )


def test_any_view_arrives_bit_by_bit_and_touches_nothing_beside_it(pair):
    dtypes = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex128)
    for dtype, (start, stop) in product(dtypes, ((0, 1), (1, 2), (3, 1000), (7, 4099))):
        data, landing = pair[0].allocate(5000, dtype), pair[1].allocate(5000, dtype)
        noise = torch.randint(0, 2, (data.nbytes,), dtype=torch.uint8)
        data.view(torch.uint8).copy_(noise)
        assert across(pair, data[start:stop], landing[start:stop]) == [None, None]
        size = dtype.itemsize
        expected = torch.zeros_like(noise)
        expected[start * size : stop * size] = noise[start * size : stop * size]
        assert torch.equal(landing.view(torch.uint8), expected), (dtype, start, stop)


def test_several_large_messages_of_one_group_are_staged_apart(pair):
    sent = [torch.full((LARGE,), value) for value in (1.0, 2.0)]
    landing = [torch.zeros(LARGE) for _ in sent]
    assert both(pair, [sending(*sent), receiving(*landing)]) == [None, None]
    assert all(map(torch.equal, landing, sent))


def test_sizes_that_differ_are_named_on_both_ends(pair):
    errors, sent, expected = across(pair, torch.ones(LARGE), torch.ones(LARGE + 1)), 4 * LARGE, 4 * LARGE + 4
    assert [type(error) for error in errors] == [SizeMismatch, SizeMismatch]
    assert f"sends {sent} bytes and the peer expects {expected}" in str(errors[0])
    assert f"sends {sent} bytes and this rank expects {expected}" in str(errors[1])
    places = [(error.place.peer, error.place.step, error.place.nbytes) for error in errors]
    assert places == [(1, 7, sent), (0, 7, expected)]


def test_of_a_small_message_the_receiver_names_the_sizes_and_a_sender_that_went_on_in_its_next_exchange(pair):
    pair[0].bind(sending(torch.ones(4)))(Tag(7, "sum"))
    receive = pair[1].bind(receiving(torch.ones(5)))
    with pytest.raises(SizeMismatch, match="sends 16 bytes and this rank expects 20"):
        receive(Tag(7, "sum"))
    errors = across(pair, torch.ones(LARGE), torch.ones(LARGE))
    assert [type(error) for error in errors] == [SizeMismatch, TransportClosed]
    assert isinstance(errors[1].__cause__, SizeMismatch)


@pytest.mark.parametrize("numel", [4, LARGE])
def test_messages_of_different_calls_are_refused_although_they_look_alike(pair, numel):
    data, landing = torch.ones(numel), torch.zeros(numel)
    bound = [pair[0].bind(sending(data)), pair[1].bind(receiving(landing))]
    pair[0].timeout_s = 0.2  # as no one takes what it offers
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(run, Tag(7, "sum", call)) for call, run in enumerate(bound)]
    assert isinstance(futures[1].exception(), CallMismatch)
    assert "rank 1, peer 0, step 7, bucket sum" in str(futures[1].exception())
    assert not landing.any()


STEPS = ("post", "receive", "source", "acknowledge", "_wake_peer")
POINTS = [*((channel.Channel, name) for name in STEPS), (packet_wait.PacketWait, "sleep")]


@pytest.mark.parametrize(("owner", "name"), POINTS)
def test_an_abort_at_any_point_of_an_exchange_takes_nothing_from_under_it(monkeypatch, pair, owner, name):
    original, ours = getattr(owner, name), [descriptor for transport in pair for descriptor in sockets(transport)]

    def preceded(*args):
        for transport in pair:
            transport.abort()
        assert [descriptor for transport in pair for descriptor in sockets(transport)] == ours
        return original(*args)

    groups = [swapping(rank, [torch.ones(LARGE)], [torch.empty(LARGE)]) for rank in range(2)]
    assert both(pair, groups) == [None, None]
    monkeypatch.setattr(packet_wait, "LOOK_S", 0.0)
    monkeypatch.setattr(owner, name, preceded)
    while (errors := both(pair, groups)) == [None, None]:
        pass  # until a rank comes to this point
    assert {type(error) for error in errors} <= {type(None), TransportClosed, PeerLost}
    monkeypatch.undo()
    assert [type(error) for error in both(pair, groups)] == [TransportClosed] * 2
    for transport in pair:
        transport.close()
    assert not any(map(sockets, pair))


MANY = 100
SOME = 1024
"""So many messages of so many numbers are more than a socket takes: see /proc/sys/net/core/wmem_default."""


def test_many_small_messages_each_way_do_not_block_each_other(pair):
    assert int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii")) < 4 * SOME * MANY
    sent = [torch.arange(float(MANY * SOME)) + rank for rank in range(2)]
    landing = [torch.zeros_like(each) for each in sent]
    groups = [swapping(rank, sent[rank].split(SOME), landing[rank].split(SOME)) for rank in range(2)]
    assert both(pair, groups) == [None, None]
    assert torch.equal(landing[0], sent[1])
    assert torch.equal(landing[1], sent[0])


def test_a_peer_that_does_not_listen_ends_in_the_deadline_even_if_the_socket_is_full():
    transports = shared(2, timeout_s=0.3)
    many = sending(*torch.ones(MANY * SOME).split(SOME))
    with pytest.raises(DeadlineExceeded, match=r"no answer from ranks \[1\] within 0.3 s.*rank 0, peer 1, step 7"):
        transports[0].bind(many)(NOW)


def test_segments_go_with_their_last_tensor_on_both_ends(pair):
    landing = torch.empty(LARGE)
    before, counts = shared_memory(), []
    for _ in range(12):
        data = pair[0].allocate(arena.SEGMENT_NBYTES // 4, torch.float32)
        assert across(pair, data[:LARGE], landing) == [None, None]
        counts.append(shared_memory())
    assert len(set(counts[2:])) == 1
    assert counts[-1][0] <= before[0] + 4


def test_closing_leaves_no_memory_and_no_descriptor():
    before, fds = shared_memory(), len(descriptors())
    pair = shared(3, PATIENT_S)[:2]
    across(pair, pair[0].allocate(LARGE, torch.float32), torch.empty(LARGE))
    across(pair, torch.ones(LARGE), torch.empty(LARGE))
    assert shared_memory() > before
    for transport in pair:
        transport.close()
    assert shared_memory() == before
    del pair, transport
    assert len(descriptors()) == fds


def test_a_rank_that_left_while_the_others_came_is_lost():
    store = HashStore()
    with pytest.raises(DeadlineExceeded):
        SharedTransport(store, 0, range(2), 0.1)
    with pytest.raises(PeerLost, match="listens no more"):
        SharedTransport(store, 1, range(2), PATIENT_S)


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_limit_on_memory_is_named_with_the_rank(monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.EFBIG, "File too large")

    first, second = shared(2, PATIENT_S)
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(TransportError, match=r"no shared memory .*File too large.* `-f`.* \[rank 0, nbytes 400000\]"):
        first.allocate(100_000, torch.float32)
    with pytest.raises(TransportError, match="no shared memory"):  # to send from
        first.bind(P2PGroup([P2PMessage(1, torch.empty(100_000))], []))
    first.close()
    second.close()


def test_connections_from_other_sockets_are_ignored():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(SharedTransport, store, 0, range(2), PATIENT_S)
        store.wait(["record/0"], timedelta(seconds=PATIENT_S))
        secret, _ = json.loads(store.get("record/0"))
        listening = local_sockets._name(bytes.fromhex(secret))
        for name in ("", local_sockets._name(bytes(local_sockets.SECRET_NBYTES), 0)):
            with local_sockets._socket(name) as stranger:
                stranger.connect(listening)
                stranger.send(b"hello")
        silent = local_sockets._socket("")
        silent.connect(listening)
        one = pool.submit(SharedTransport, store, 1, range(2), PATIENT_S)
        pair = zero.result(), one.result()
        silent.close()
    landing = torch.zeros(3)
    assert across(pair, torch.ones(3), landing) == [None, None]
    assert landing.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.processes
def test_a_killed_process_is_noticed_at_once_though_a_forked_child_lives_on():
    children = []

    def on_message(rank, child, process):
        children.append(child)
        os.kill(process.pid, signal.SIGKILL)
        return True

    try:
        outcomes = run_processes(2, rendezvous_ranks.forks_and_waits, PATIENT_S, on_message=on_message)
        os.kill(children[0], 0)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert outcomes[0].error is not None
    assert outcomes[0].error.startswith("PeerLost")


CHOSEN = {
    (None, "aaa"): "shared",
    ("shared", "aaa"): "shared",
    ("gloo", "aaa"): "gloo",
    (None, "aba"): "shared and gloo",
    (None, "abc"): "gloo",
    (None, "---"): "gloo",
}
INSISTED = ("shared", "aba")


@pytest.mark.processes
def test_all_ranks_choose_the_same_transport_or_are_all_told_that_there_is_none():
    outcomes = run_processes(3, rendezvous_ranks.on_hosts, [*CHOSEN, INSISTED])
    assert [outcome.error for outcome in outcomes] == [None] * 3
    for *kinds, insisted in (outcome.value for outcome in outcomes):
        assert dict(zip(CHOSEN, kinds, strict=True)) == CHOSEN
        assert "COMMRT_TRANSPORT=shared, but not all ranks" in insisted


def test_small_messages_arrive_although_their_sender_has_left(pair):
    first, second = torch.zeros(2), torch.zeros(2)
    recvs = [pair[1].bind(receiving(landing)) for landing in (first, second)]
    for value in (1.0, 2.0):
        pair[0].bind(sending(torch.full((2,), value)))(NOW)
    pair[1]._channels[0].receive()
    pair[1]._channels[0].receive()  # both are here, and the next packet is the end
    pair[0].close()
    for receive in recvs:
        receive(NOW)
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_packet_on_the_socket_that_is_none_ends_in_words(pair):
    assert both(pair, [swapping(rank, [torch.ones(2)], [torch.empty(2)]) for rank in range(2)]) == [None, None]
    pair[1]._channels[0]._socket.send(b"garbage")
    with pytest.raises(TransportError, match="malformed packet"):
        pair[0].bind(P2PGroup([], [P2PMessage(1, torch.empty(3))]))(NOW)
