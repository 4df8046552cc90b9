# SPDX-License-Identifier: Apache-2.0
"""Every transport keeps every rule, and says who waits for whom."""

import gc
import os
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pkgutil import resolve_name
from time import sleep

import nccl_stand_in as stand_in
import pytest
import torch
from cases import for_each
from peer_group import on_threads
from torch.distributed import HashStore
from transports import (
    gloo,
    hierarchical,
    local,
    nccl,
    nccl_of_one,
    over_nccl,
    pairs_on_a_host,
    peers,
    shared,
    two_hosts_in_turn,
)

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError, UsageError
from commrt.kernels.dispatch import ON_GPUS
from commrt.runtime import gpu_connection
from commrt.store.rendezvous import listen
from commrt.testing import conformance
from commrt.testing.faults import fail_at, with_faults
from commrt.transport import gloo_listeners, open_files
from commrt.transport.by_device import TransportByDevice
from commrt.transport.gloo import GlooTransport
from commrt.transport.names import GPU_TRANSPORTS
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag
from commrt.transport.shared import SharedTransport


def harmless(ranks, timeout_s):
    return [with_faults(fail_at(step=10**6))(transport) for transport in local(ranks, timeout_s)]


def by_device(ranks, timeout_s):
    return [TransportByDevice(transport) for transport in local(ranks, timeout_s)]


@pytest.mark.parametrize(
    "make", [local, gloo, shared, two_hosts_in_turn, nccl, peers, harmless, by_device], ids=lambda make: make.__name__
)
@for_each("check", conformance.CHECKS)
def test_conforms(make, check):
    check(make)


def test_what_stays_on_a_host_and_what_leaves_it_are_under_way_together():
    """Rank 0 waits for its neighbour 1, who waits for rank 2, who waits for what rank 0 sends in the same group."""

    def body(transport):
        data, landing = torch.full((100_000,), float(transport.rank)), torch.zeros(100_000)
        groups = {
            0: [P2PGroup([P2PMessage(2, data)], [P2PMessage(1, landing)])],
            1: [P2PGroup([], [P2PMessage(2, landing)]), P2PGroup([P2PMessage(0, data)], [])],
            2: [P2PGroup([], [P2PMessage(0, landing)]), P2PGroup([P2PMessage(1, data)], [])],
        }
        for group in groups.get(transport.rank, []):
            transport.bind(group)(Tag(0, 0))
        return landing[0].item()

    transports = pairs_on_a_host(4, 30.0)
    assert on_threads(4, lambda rank: body(transports[rank])) == [1.0, 2.0, 0.0, 0.0]


def test_what_should_come_from_afar_lands_no_more_after_a_neighbour_is_gone():
    transports = pairs_on_a_host(4, 30.0)
    near, far = torch.zeros(4), torch.zeros(4)
    exchange = transports[0].bind(P2PGroup([], [P2PMessage(1, near), P2PMessage(2, far)]))
    transports[1].close()
    with pytest.raises(PeerLost):
        exchange(Tag(0, 0))
    with pytest.raises(PeerLost):
        transports[2].bind(P2PGroup([], [P2PMessage(0, torch.ones(4))]))(Tag(0, 0))
    assert far.tolist() == [0.0] * 4


def test_a_peer_that_is_lost_is_named_before_a_neighbour_that_is_late():
    transports = pairs_on_a_host(4, 1.0)
    exchange = transports[0].bind(P2PGroup([], [P2PMessage(1, torch.zeros(4)), P2PMessage(2, torch.zeros(4))]))
    transports[2].close()
    with pytest.raises(PeerLost) as caught:
        exchange(Tag(0, 0))
    assert caught.value.place.peer == 2


def test_a_local_deadline_prints_who_waits_for_whom_and_ends_the_transfer():
    (first, second, _), landing = local(3, 0.2), torch.zeros(1)
    with pytest.raises(DeadlineExceeded, match=r"who waits for whom: 0->1"):
        first.bind(P2PGroup([], [P2PMessage(1, landing)]))(Tag(0, 0))
    with pytest.raises(DeadlineExceeded):
        second.bind(P2PGroup([P2PMessage(0, torch.ones(1))], []))(Tag(0, 0))
    assert landing.item() == 0.0


def gloo_rank(store, rank, members, timeout_s):
    return GlooTransport(store, rank, members, timeout_s, "127.0.0.1")


def test_a_closed_transport_of_nccl_is_not_watched_any_more():
    transports = over_nccl(HashStore(), 2, 10.0)
    on_threads(2, lambda rank: transports[rank].close())
    assert [transport.watch.communicator.ended.is_set() for transport in transports] == [True, True]


def test_whoever_collects_a_transport_of_nccl_does_not_wait_for_its_abort():
    transports = over_nccl(HashStore(), 2, 10.0)
    communicators = [transport.watch.communicator.nccl for transport in transports]
    with stand_in.changed:  # an abort on another thread needs this lock
        del transports
        gc.collect()
        assert all(each.comm for each in communicators)
    while any(each.comm for each in communicators):  # until the test's own timeout
        sleep(0.01)
        gc.collect()


def test_an_abort_amid_the_start_of_a_transfer_is_an_error_with_its_whole_place(monkeypatch):
    transport, other = gloo(2, 10.0)

    def post_too_late(*given, **how):
        transport.abort()
        return GlooTransport.post(transport, *given, **how)

    monkeypatch.setattr(transport, "post", post_too_late)
    exchange = transport.bind(P2PGroup([P2PMessage(1, torch.zeros(4))], [], hop=5))
    with pytest.raises(TransportClosed) as raised:
        exchange(Tag(2, 3))
    assert raised.value.place == Place(rank=0, peer=1, step=2, bucket=3, hop=5, nbytes=16)
    other.close()


@pytest.mark.parametrize("open_one", [SharedTransport, gloo_rank, nccl_of_one])
def test_some_ranks_of_a_world_exchange_under_its_numbers(open_one):
    store, members = HashStore(), (1, 3, 4)

    def body(place):
        rank, after, before = members[place], members[(place + 1) % 3], members[place - 1]
        data, landing = torch.tensor([float(rank)]), torch.zeros(1)
        with closing(open_one(store, rank, members, 10.0)) as transport:
            transport.bind(P2PGroup([P2PMessage(after, data)], [P2PMessage(before, landing)]))(Tag(0, 0))
            with pytest.raises(UsageError, match=r"names ranks \[2\], but there are only ranks 1, 3, 4"):
                transport.bind(P2PGroup([P2PMessage(2, landing)], []))
        return landing.item() == before

    assert on_threads(3, body) == [True] * 3


@pytest.mark.parametrize(
    ("open_one", "opens"), [(gloo_rank, "gloo._devices"), (SharedTransport, "local_sockets._socket")]
)
def test_a_rank_that_can_open_no_sockets_is_named_by_all_at_once(monkeypatch, open_one, opens):
    store, limits = HashStore(), [OSError("Too many open files")]
    open_sockets = resolve_name(f"commrt.transport.{opens}")

    def limited(*given, **how):
        if limits:
            raise limits.pop()
        return open_sockets(*given, **how)

    def body(rank):
        with pytest.raises(TransportError, match=r"rank \d can.*Too many open files.*ulimit -n") as raised:
            open_one(store, rank, range(3), 60.0)
        return raised.value.place.peer

    monkeypatch.setattr(f"commrt.transport.{opens}", limited)
    assert len({*on_threads(3, body)}) == 1


def test_a_rank_alone_on_its_host_needs_no_shared_memory(monkeypatch):
    transports = hierarchical([0, 0, 1], 10.0)
    monkeypatch.delattr(os, "memfd_create")
    data = transports[2].allocate(100_000, torch.float32)
    landing = torch.zeros(100_000)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(transports[2].bind(P2PGroup([P2PMessage(0, data.fill_(3))], [])), Tag(0, 0))
        transports[0].bind(P2PGroup([], [P2PMessage(2, landing)]))(Tag(0, 0))
        sent.result()
    assert landing.unique().tolist() == [3.0]
    for transport in transports:
        transport.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_nobody_connects_to_gloo_once_all_ranks_have():
    before = listening()
    first, second = gloo(2, 10.0)
    opened = listening() - before
    assert len(opened) == 2
    for address in opened:
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(address, 0.1)
    first.close()
    second.close()


def listening():
    return {end.getsockname() for end in gloo_listeners._listening()}


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_only_the_named_socket_refuses_connections():
    with closing(listen()) as named, closing(listen()) as other:
        early = socket.create_connection(named.getsockname())
        gloo_listeners.refuse_connections(b"before" + gloo_listeners._sockaddr(named) + b"after")
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(named.getsockname(), 0.1)
        early.sendall(b"still here")
        with closing(named.accept()[0]) as accepted:
            assert accepted.recv(10) == b"still here"
        socket.create_connection(other.getsockname(), 10.0).close()
        early.close()


def test_the_soft_limit_of_files_becomes_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        open_files.raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, open_files.MOST_FILES), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("open_one", [SharedTransport, gloo_rank])
def test_a_default_device_does_not_reach_a_transport(open_one):
    store = HashStore()

    def body(rank):
        data, landing = torch.ones(4), torch.zeros(4)
        with torch.device("meta"), closing(open_one(store, rank, range(2), 10.0)) as transport:
            assert transport.allocate(0, torch.float32).device.type == "cpu"
            transport.bind(P2PGroup([P2PMessage(1 - rank, data)], [P2PMessage(1 - rank, landing)]))(Tag(0, 0))
        return landing.tolist()

    assert on_threads(2, body) == [[1.0] * 4] * 2


@pytest.mark.parametrize("where", [*GPU_TRANSPORTS.values(), *ON_GPUS.values(), gpu_connection.NCCL_BINDING])
def test_what_is_imported_by_name_for_gpus_is_there(where):
    assert callable(resolve_name(where))
