# SPDX-License-Identifier: Apache-2.0
"""Ranks find each other through one store, and a store that is dead, stopped or no store at all is an error in time."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import rendezvous_ranks

from commrt.errors import DeadlineExceeded, TransportError
from commrt.store.client import is_loopback, listen, meet
from commrt.store.launcher import Launch
from commrt.testing.processes import free_port, run_processes

LIMIT_S = 80.0


def launch(rank, port, address="127.0.0.1"):
    return Launch("torchrun", rank, 2, rank, 2, address, port)


def free_port_at(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            pytest.skip(f"no {address} on this machine: {error}")
        return probe.getsockname()[1]


def test_a_port_where_something_listens_but_never_answers_is_an_error():
    says = r"did not answer as a store within 0\.3 s.* \[rank 1, peer 0\]"
    with listen() as silent, pytest.raises(DeadlineExceeded, match=says):
        meet(launch(1, silent.getsockname()[1]), 0.3)


def test_a_port_where_nobody_listens_is_an_error():
    with pytest.raises(DeadlineExceeded, match=r"no store at 127\.0\.0\.1:\d+ within 0\.3 s"):
        meet(launch(1, free_port()), 0.3)


def test_a_port_that_is_taken_is_an_error_at_once():
    with listen() as other, pytest.raises(TransportError, match="is taken on this machine: set MASTER_PORT"):
        meet(launch(0, other.getsockname()[1]), 60)


LOOPBACKS = {
    "127.0.0.1": ("127.0.0.1", "127.0.0.2"),
    "localhost": ("127.0.0.1", "127.0.0.2"),
    "127.0.0.9": ("127.0.0.9", "127.0.0.1"),
    "::1": ("::1", "127.0.0.1"),
}
"""Where the store listens, and where it would listen too if it did on all addresses."""


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_store_on_the_loopback_is_for_this_machine_alone(address):
    ours, other = LOOPBACKS[address]
    port = free_port_at(ours)
    meet(launch(0, port, address), 5)
    meet(launch(1, port, address), 5).set("found", "")
    with socket.create_connection((ours, port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, port), timeout=5)


def test_only_addresses_that_nobody_else_can_reach_are_the_loopback():
    assert all(map(is_loopback, [*LOOPBACKS, "127.255.255.254", "LocalHost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "::", "fe80::1", "128.0.0.1", "gpu3", "localhost.example"]))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("signal_number", "says"),
    [
        pytest.param(signal.SIGSTOP, "DeadlineExceeded: no answer from ranks [0]", marks=pytest.mark.slow),
        (signal.SIGKILL, "PeerLost: the peer is gone"),
    ],
    ids=["stopped", "killed"],
)
def test_a_store_that_goes_away_during_a_question_is_named(signal_number, says):
    def strike(rank, message, process):
        os.kill(process.pid, signal_number)
        return True

    outcomes = run_processes(3, rendezvous_ranks.ask_without, 0, [3.0] * 3, limit_s=LIMIT_S, on_message=strike)
    for other in outcomes[1:]:
        assert str(other.error).startswith(says)
        assert f"[rank {other.rank}, peer 0, step 0, bucket lunch" in other.error


@pytest.mark.processes
def test_the_holder_of_the_store_outlives_its_own_deadline_for_the_others_to_read_why():
    timeouts_s = [1.0, 30.0, 60.0]
    outcomes = run_processes(
        3, rendezvous_ranks.ask_without, 2, timeouts_s, limit_s=LIMIT_S, on_message=lambda *_: True
    )
    assert str(outcomes[0].error).startswith("DeadlineExceeded: no answer from ranks [2] within 1 s")
    assert "Rank 0 saw DeadlineExceeded: no answer from ranks [2] within 1 s" in str(outcomes[1].error)


ORDERS = {
    "world next world next world group end world": ["torchrun"] * 4,
    "world end group world end world": ["torchrun", "torch.distributed", "torchrun"],
    "group world end group end world group": ["torch.distributed", "torchrun"],
}


@pytest.mark.processes
@pytest.mark.parametrize("order", ORDERS)
def test_worlds_and_torch_s_groups_meet_at_the_same_port_in_any_order(tmp_path, order):
    ends = str(tmp_path / "ends")
    outcomes = run_processes(2, rendezvous_ranks.worlds_and_groups, ends, *order.split(), limit_s=LIMIT_S)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, ORDERS[order])] * 2
