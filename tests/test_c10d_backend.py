# SPDX-License-Identifier: Apache-2.0
"""What other versions of torch need: the backend of 2.14, and works that 2.8 and earlier would forget."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError, HashStore, ReduceOp

from commrt.c10d import call_engine, create, group
from commrt.c10d.backend import CommrtBackend
from commrt.c10d.checked_calls import CheckedCalls
from commrt.errors import TransportError
from commrt.threads.future import Future


@pytest.fixture
def backend():
    """One without the half that torch writes in C++, which versions before 2.14 do not make."""
    backend = CommrtBackend.__new__(CommrtBackend)
    backend.group = SimpleNamespace(requests=CheckedCalls(0, 2), device_messages=SimpleNamespace(waiting=[]))
    return backend


def test_torch_begins_sends_and_receives_one_by_one(backend):
    assert backend.supports_coalescing is False


def test_a_receive_from_any_rank_is_refused_with_what_to_do(backend):
    with pytest.raises(DistBackendError, match="not possible with this version of torch: name src"):
        backend.recv_anysource([], 0)


def test_a_group_that_cannot_open_its_sockets_raises_torchs_error(monkeypatch):
    def fail(*_, **__):
        raise TransportError("not all ranks connected")

    monkeypatch.setattr(group, "GlooTransport", fail)
    place = {"group_rank": 0, "group_size": 1, "global_ranks_in_group": [], "group_id": "test"}
    with pytest.raises(DistBackendError, match="not all ranks connected"):
        create(SimpleNamespace(timeout=timedelta(seconds=9), store=HashStore(), **place))


OF_OTHER_OVERLOADS = {
    "an operation": lambda backend, one: backend.allreduce([one], ReduceOp.MAX),
    "an operation of sparse tensors": lambda backend, one: backend.allreduce([one.to_sparse()], ReduceOp.MAX),
    "a root": lambda backend, one: backend.broadcast(one, 1),
    "a timeout": lambda backend, one: backend.barrier(timedelta(seconds=9)),
}


@pytest.mark.parametrize("call", OF_OTHER_OVERLOADS.values(), ids=OF_OTHER_OVERLOADS)
def test_what_stands_in_place_of_options_is_refused(backend, call):
    with pytest.raises(DistBackendError, match=r"has no \w+: pass an options object"):
        call(backend, torch.ones(2))


def test_a_work_is_kept_alive_until_somebody_has_waited_for_it(monkeypatch):
    monkeypatch.setattr(call_engine, "_newest", deque(maxlen=32))  # as with torch 2.8
    future = Future()
    work = call_engine.GroupWork(future, [torch.zeros(1)])
    future.set_result(None)
    assert list(call_engine._newest) == [work]
    work.wait()
    assert not call_engine._newest
