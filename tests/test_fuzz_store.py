# SPDX-License-Identifier: Apache-2.0
"""Whatever another program writes to the store: the world goes on, or ends in an error of ours by its deadline."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from fuzzing import FILES, VALUES, cases, in_time, met
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import train, trainee
from torch.distributed import HashStore, Store

import commrt
from commrt.backup_workers.quorum import parse_announcements
from commrt.elastic.member import Member
from commrt.elastic.state_server import request_state
from commrt.errors import CommrtError, DisagreementError, PeerLost, Place
from commrt.runtime import connection
from commrt.runtime.generation import Generation
from commrt.store.records import gather
from commrt.store.reports import diagnose
from commrt.store.world_config import WorldConfig
from commrt.testing.ranks import run_ranks
from commrt.training.join_progress import JoinProgress
from commrt.transport import local_sockets, nccl_communicator, shutdown_notices

JUNK = st.one_of(
    FILES, VALUES.map(json.dumps).map(str.encode), st.sampled_from([b"null", b"{}", b"[]", b"0", b"x" * 10**6])
)
LINES = st.lists(st.lists(st.sampled_from(["here", "left", "missed"]) | VALUES, max_size=6).map(json.dumps), max_size=3)
FOUNDERS = Generation(0, {0: 0, 1: 0})
WORDS = st.lists(st.sampled_from(["0@0@a", "@0@", "x@0@", "-1@0@", "1@0@1:2:3", "0@x@", "1@1@"]), max_size=4)


def planted(key, said):
    store = HashStore()
    store.set(key, said)
    return store


READERS = [
    lambda said: WorldConfig.read(planted("world configuration", said)),
    lambda said: parse_announcements(said.decode(errors="replace"), 0),
]
RECORDS = [connection._parse_told, local_sockets._parse_caller, nccl_communicator._parse_info]


@cases(60)
@given(JUNK | WORDS.map(" ".join).map(str.encode))
@example(json.dumps({"size": "2", "host": None, "model": 1, "claim": {}}).encode())
@example(b'{"size": 2}')
@example(b"\xff")
@example(b'["here", ["world size"]]')
@example(b'["here", {"world size": 2}]')
@example(b'["00", "zz"]')
@example(b'[22809, null, "0"]')
@example(b"x@0@@0.0@0.0")
@example(b"0@0@@nan@0.0")
def test_a_value_is_understood_or_is_refused_in_words(said):
    for read in READERS:
        met(read, said)
    for read in RECORDS:
        met(gather, planted("record/1", said), 0, [1], None, 1.0, read)


@cases(60)
@given(JUNK | LINES.map("\n".join).map(str.encode))
@example(b'["here"]')
@example(b'[0, "open", 1, [[0, 0]], 0, [], [], 0]')
@example(b'[-1, "open", 1, [[0, 0]], 0, [], [], 0]')
@example(b'[0, "closed", 1, [[0, 0]], 0, [], [], 0]')
@example(b'[0, "open", 1, [[0, 0]], 0, [[1, 2, "why", false]], [], 0]')
@example(b'[0, 1, "why", 1]')
@example(b'[2, "localhost 99999"]')
def test_what_is_written_about_members_is_understood_or_refused_in_words(said):
    store = HashStore()
    membership = Member(store, 0, FOUNDERS, lambda: 0.2)
    membership.generation = FOUNDERS
    for key in ("departed", "arrived/0.1", "process/1"):
        store.set(key, said)
    met(membership.absent, FOUNDERS, [0])
    met(membership.ranks_in_collective, FOUNDERS)
    store.set("head", said)
    met(membership.current)


@cases(20)
@given(JUNK | WORDS.map(" ".join).map(str.encode))
@example(b"\xff 1")
@example(b"one")
@example(f".. 80 {'00' * 16}".encode())
def test_words_of_ranks_are_understood_or_refused_in_words(said):
    store = HashStore()
    for key in ("1", "report/1", "left/1"):
        store.set(key, said)
    membership = SimpleNamespace(any_gone=lambda _: True)
    progress = JoinProgress(store, SimpleNamespace(rank=0, members=[0, 1], timeout_s=1.0, membership=membership))
    progress.begin(1)
    met(progress.last)
    met(lambda: list(progress.outlast(0)))
    met(diagnose, store, 0, 2, PeerLost("gone", Place(0, 1)))
    departures = shutdown_notices.ShutdownNotices(store, 0, 1.0)
    departures.find_early_leaver({1: 1})
    departures._reading.exception(5.0)
    departures.find_early_leaver({1: 1})
    met(request_state, said[:99].decode(errors="replace"), 1, 0.5, 0.5)


ALGORITHMS = [commrt.Ring(), commrt.Gossip(), commrt.BackupWorkers(1)]


def trained(world, algorithm):
    model, optimizer, replica = trainee(world, algorithm=algorithm)
    train(model, optimizer, world.rank, steps=3)
    replica.detach()
    return True


@pytest.mark.filterwarnings("ignore:the process ends after")
@cases(4)
@given(st.sampled_from(ALGORITHMS), st.integers(0, 60), FILES | st.sampled_from([b"null", b"[]", b"7"]))
def test_a_world_that_reads_something_else_than_was_written_goes_on_or_ends_in_an_error_of_ours(algorithm, place, said):
    read, write, lock, reads = Store.get, Store.multi_get, threading.Lock(), [0]

    def garbled(whole):
        def get(self, key):
            found = whole(self, key)
            with lock:
                reads[0] += 1
                is_struck = reads[0] == place
            return (said if isinstance(key, str) else [said] * len(key)) if is_struck else found

        return get

    with pytest.MonkeyPatch.context() as patch, in_time(60):
        patch.setattr(Store, "get", garbled(read))
        patch.setattr(Store, "multi_get", garbled(write))
        try:
            assert all(run_ranks(3, lambda world: trained(world, algorithm), timeout_s=2.0))
        except CommrtError as error:
            assert str(error).strip()  # noqa: PT017  # or it went on


def test_the_error_says_what_to_do():
    with pytest.raises(
        DisagreementError, match=r"world configuration cannot be parsed: b'junk'.*start all ranks with one version"
    ):
        WorldConfig.read(planted("world configuration", b"junk"))
