# SPDX-License-Identifier: Apache-2.0
"""The memory that ranks of a host map of each other: who may, who agrees not to, what is freed when."""

import json

import nccl_stand_in as stand_in
import pytest
import torch
from peer_group import ODD, TIMEOUT_S, connected, on_threads, wait_until
from peer_memory import HostIpcMemory
from torch.distributed import HashStore

from commrt.errors import DisagreementError, SizeMismatch, UsageError
from commrt.runtime.gpu_connection import connect_gpu
from commrt.transport import peers
from commrt.transport.mapped_memory import MappedMemory
from commrt.transport.protocol import CPU


def test_memory_of_a_buffer_that_is_gone_serves_again_and_memory_in_use_does_not():
    with connected("aa") as group:
        allocate = group.transports[0].allocate_shared
        first, second = (allocate(ODD, torch.float32) for _ in range(2))
        place, kept = first.fill_(7.0).data_ptr(), second.fill_(5.0)
        del first
        much_smaller = allocate(10, torch.float32)
        again, other = (allocate(ODD - 9, torch.float32) for _ in range(2))
        assert again.data_ptr() == place
        assert not again.any()
        assert len({place, kept.data_ptr(), other.data_ptr(), much_smaller.data_ptr()}) == 4
        assert bool((kept == 5.0).all())


def test_memory_is_freed_when_all_peers_have_unmapped_it():
    with connected("aaa") as group:
        del group.buffers(ODD)[:]
        first, transport = group.memories[0], group.transports[0]
        closed = group.pool.submit(transport.close)
        wait_until(lambda: group.store.check(["peers/unmapped/0"]))
        assert (first.mapped, first.allocated) == (0, 2)  # its page and its buffer
        for other in group.transports[1:]:
            group.pool.submit(other.close)
        closed.result(60)
        assert first.allocated == 1  # the page, until the transport is gone


def test_all_ranks_refuse_to_share_buffers_of_different_sizes():
    with connected("aaa") as group:

        def share(rank):
            transport = group.transports[rank]
            with pytest.raises(SizeMismatch, match="shares buffers of other sizes"):
                transport.share([transport.allocate_shared(8 + (rank == 2), torch.float32)])

        group.on_all(share)


class Wrong(HostIpcMemory):
    """A page of a peer shows other numbers than that has written."""

    def open(self, handle, nbytes):
        return super().open(handle, nbytes)[::-1].copy()

    def close(self, segment):
        """Do nothing: it has mapped nothing."""


class Refusing(HostIpcMemory):
    """A device that maps nothing."""

    def open(self, handle, nbytes):
        raise RuntimeError("peer access is not supported between these two devices")


class Hiding(HostIpcMemory):
    """A device whose memory cannot be mapped by others."""

    def handle(self, segment):
        raise RuntimeError("operation not supported")


FAULTS = {
    "its page shows other numbers than it has written": Wrong,
    "peer access is not supported": Refusing,
    "operation not supported": Hiding,
}


@pytest.mark.parametrize(("why", "memory"), FAULTS.items(), ids=FAULTS)
def test_all_ranks_of_a_host_refuse_if_one_of_them_cannot_map_and_other_hosts_do_not(why, memory):
    memories = [HostIpcMemory(), memory(), *(HostIpcMemory() for _ in range(3))]
    store, hosts = HashStore(), "aaabb"
    found = on_threads(5, lambda r: MappedMemory(store, r, range(5), TIMEOUT_S, memories[r], hosts[r]))
    assert [list(each.local_peers) for each in found] == [[], [], [], [4], [3]]
    assert len({each.refusal for each in found[:3]}) == 1
    assert "rank 1" in found[0].refusal
    assert why in found[0].refusal
    assert [each.refusal for each in found[3:]] == ["", ""]
    assert [each.mapped for each in (memories[0], *memories[2:])] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("memory", "hosts", "asked", "kind"),
    [
        (HostIpcMemory, "aa", None, "peers' memory and nccl"),
        (HostIpcMemory, "aa", "peers", "peers' memory and nccl"),
        (HostIpcMemory, "aa", "nccl", "nccl"),
        (HostIpcMemory, "ab", "peers", "nccl"),
        (Refusing, "aa", None, "nccl"),
    ],
)
def test_ranks_read_each_other_s_memory_where_they_can_unless_asked_not_to(memory, hosts, asked, kind, monkeypatch):
    if asked:
        monkeypatch.setenv("COMMRT_TRANSPORT", asked)
    transports = connected_gpus(memory, hosts, monkeypatch)
    assert [transport.kind for transport in transports] == [kind] * 2
    for transport in transports:
        transport.abort()


def test_who_asks_for_peers_memory_is_told_why_there_is_none(monkeypatch):
    monkeypatch.setenv("COMMRT_TRANSPORT", "peers")
    with pytest.raises(UsageError, match=r"COMMRT_TRANSPORT=peers, .*peer access is not supported.* Unset it"):
        connected_gpus(Refusing, "aa", monkeypatch)


def connected_gpus(memory, hosts, monkeypatch):
    """What two ranks on `hosts` exchange by, over stand-ins for NCCL and for GPUs' memory."""
    memories, store, places = iter([HostIpcMemory(), memory()]), HashStore(), iter(hosts)
    monkeypatch.setattr(peers, "IpcMemory", lambda device: next(memories))
    monkeypatch.setattr(peers, "host_identity", places.__next__)
    monkeypatch.setattr("commrt.transport.nccl.load", lambda: stand_in)

    def one(rank):
        return connect_gpu(store, rank, range(2), TIMEOUT_S, CPU, lambda error: None)

    return on_threads(2, one)


MALFORMED = [
    ("pages", ["a", "00"]),
    ("pages", ["a", "no hex", 5]),
    ("verdicts", None),
    ("share 1", [["", 64, 0, 64]]),
    ("share 1", [["00", 64, 1, 64]]),
]


@pytest.mark.parametrize(("what", "record"), MALFORMED, ids=repr)
def test_malformed_records_of_another_rank_are_refused_in_words(what, record):
    store = HashStore()
    for name, planted in {"pages": ["b", "00", 5], "verdicts": "", what: record}.items():
        store.set(f"{name}/record/1", json.dumps(planted))
    with pytest.raises(DisagreementError, match="what the store holds as the record of rank 1 cannot be parsed"):
        share_alone(store)


def share_alone(store):
    """Connect rank 0, and let it share, with what the store holds of rank 1."""
    mapped = MappedMemory(store, 0, range(2), TIMEOUT_S, HostIpcMemory(), "a")
    mapped.local_peers = [1]
    mapped.share([mapped.allocate(16, torch.float32)], TIMEOUT_S)
