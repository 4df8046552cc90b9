# SPDX-License-Identifier: Apache-2.0
"""Random connections to a world's sockets do not stop it; on one machine it opens none to other machines."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress

import pytest
from fuzzing import FILES, cases, in_time, met
from hypothesis import example, given
from hypothesis import strategies as st
from rendezvous_ranks import where_a_world_listens

from commrt.elastic import state_server
from commrt.elastic.links import probe
from commrt.elastic.listener import Listener
from commrt.elastic.state_server import NBYTES, YES, StateServer, request_state
from commrt.testing.processes import run_processes
from commrt.transport.names import TRANSPORTS

LOOPBACK = "127.0.0.1"
LOOPBACKS = {"0100007F", f"{0:024}01000000"}
"""The two of /proc/net/tcp and tcp6."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_world_on_one_machine_listens_on_the_loopback_only(monkeypatch, transport):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    for outcome in run_processes(3, where_a_world_listens):
        assert outcome.error is None
        kind, addresses = outcome.value
        assert kind == transport
        assert len(addresses) >= 2  # a liveness listener and a state server
        assert set(addresses) <= LOOPBACKS


@pytest.fixture
def open_service():
    served = StateServer(LOOPBACK, lambda number: (piece for piece in (b"", str(number).encode())))
    yield served
    served.close()


@cases(20)
@given(said=FILES)
@example(said=b"\0" * state_server.REQUEST.size)
@example(said=b"\0" * (state_server.REQUEST.size - 1))
def test_a_service_goes_on_after_any_bytes(open_service, said):
    host, port, _ = open_service.address.split()
    with in_time(), suppress(ConnectionError), socket.create_connection((host, int(port)), 5.0) as line:
        line.sendall(said)
        with suppress(OSError):  # of one that has hung up already
            line.shutdown(socket.SHUT_WR)
        assert line.recv(100) == b""
    assert request_state(open_service.address, 7, 5.0, 5.0) == b"7"


def test_idle_connections_to_a_server_delay_nobody_and_are_few(monkeypatch):
    monkeypatch.setattr(state_server, "PASSWORD_S", 1e6)
    monkeypatch.setattr(state_server, "MAX_SILENT", 4)
    served = StateServer(LOOPBACK, lambda number: (piece for piece in (b"", b"yes")))
    host, port, _ = served.address.split()
    lines = [socket.create_connection((host, int(port)), 5.0) for _ in range(20)]
    assert request_state(served.address, 7, 5.0, 5.0) == b"yes"
    assert [line.recv(1) for line in lines[:16]] == [b""] * 16  # disconnected
    for line in lines:
        line.close()
    served.close()


@cases(20)
@given(said=FILES | st.integers(0, 2**64 - 1).map(lambda nbytes: YES + NBYTES.pack(nbytes) + b"ab"))
@example(said=YES + NBYTES.pack(2**63))
@example(said=YES + NBYTES.pack(2**50) + b"a")
def test_a_request_to_an_unknown_server_returns_some_bytes_or_none(said):
    with socket.create_server((LOOPBACK, 0)) as listener:

        def answer():
            with suppress(OSError), listener.accept()[0] as line:
                line.recv(100)
                line.sendall(said)

        stranger = threading.Thread(target=answer, daemon=True)
        stranger.start()
        address = f"{LOOPBACK} {listener.getsockname()[1]} {'00' * 16}"
        found = met(request_state, address, 7, 5.0, 5.0)
        stranger.join()
        assert found is None or len(found) <= len(said)


@cases(20)
@given(said=FILES)
def test_a_liveness_listener_goes_on_after_any_bytes(said):
    listener = Listener(LOOPBACK)
    host, port = listener.address.split()
    with suppress(ConnectionError), socket.create_connection((host, int(port)), 5.0) as line:
        line.sendall(said)
    assert probe([listener.address], 5.0)[listener.address]
    listener.close()
