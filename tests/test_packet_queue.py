# SPDX-License-Identifier: Apache-2.0
"""Packets in memory arrive whole and in order, and whoever waits for one is woken up."""

from itertools import combinations, product
from random import Random
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair

import pytest

from commrt.transport import channel
from commrt.transport.packet_queue import CAPACITY_NBYTES, QUEUE_NBYTES, READ, STATE, WRITTEN, PacketQueue

FENCE = "fence"


def ends():
    memory = memoryview(bytearray(QUEUE_NBYTES))
    return PacketQueue(memory), PacketQueue(memory)


def test_packets_of_any_size_arrive_in_order_whoever_is_ahead():
    draw, (writer, reader) = Random(0), ends()
    waiting, sent, received = [], 0, 0
    for _ in range(20_000):
        if draw.random() < 0.5:
            packet = bytes([sent % 251]) * draw.choice([0, 1, 8, 100, channel.PACKET_NBYTES])
            if writer.put(packet):
                waiting.append(packet)
                sent += 1
            else:
                assert sum(map(len, waiting)) > CAPACITY_NBYTES // 4
        else:
            packet = reader.get()
            assert packet == (waiting.pop(0) if waiting else None)
            received += packet is not None
    assert received > 5_000


class Words:
    """The words of a queue, which note each load and store."""

    def __init__(self, name, words, steps):
        self._name, self._words, self._steps = name, words, steps

    def __getitem__(self, word):
        self._steps.append(("load", (self._name, word)))
        return self._words[word]

    def __setitem__(self, word, value):
        self._steps.append(("store", (self._name, word)))
        self._words[word] = value


@pytest.fixture
def pair():
    """Two ends of a channel, 0 and 1, and the steps that each makes in the memory of both."""
    steps, found = ([], []), []
    memories = [memoryview(bytearray(QUEUE_NBYTES)) for _ in range(2)]
    for own, end in enumerate(socketpair(AF_UNIX, SOCK_SEQPACKET)):
        found.append(channel.Channel(end))
        queues = {own: PacketQueue(memories[own]), 1 - own: PacketQueue(memories[1 - own])}
        found[own]._written, found[own]._read = queues[own], queues[1 - own]
        for name, queue in queues.items():
            queue._words = Words(name, queue._words, steps[own])
    yield found, steps
    for each in found:
        each._socket.close()


def recorded(end, act, pair, monkeypatch):
    steps = pair[1][end]
    steps.clear()
    monkeypatch.setattr(channel, "fence", lambda: steps.append((FENCE, None)))
    act()
    return [*steps]


def sees(programs, order, kept_most):
    """Which word each of two programs has loaded after the other one's store of it, if they run in this order.

    A processor may keep back so many stores of each, until its next fence.
    """
    stored, kept, at, found = set(), ([], []), [0, 0], set()
    for end in order:
        kind, word = programs[end][at[end]]
        at[end] += 1
        if kind == "store":
            kept[end].append(word)
        elif kind == "load" and word in stored:
            found.add(word)
        while len(kept[end]) > (0 if kind == FENCE else kept_most[end]):
            stored.add(kept[end].pop(0))
    return found


def losses(waker, sleeper, news, flag):
    """Return the orders in which one sleeps, as it sees no news, and the other one does not see that it does."""
    places = range(len(waker) + len(sleeper))
    for first in combinations(places, len(waker)):
        order = [0 if place in first else 1 for place in places]
        for kept_most in product(range(3), repeat=2):
            if not {news, flag} & sees((waker, sleeper), order, kept_most):
                yield order


@pytest.mark.parametrize("waits_for", ["a packet", "room"])
def test_in_no_order_of_loads_and_stores_does_one_sleep_whom_the_other_does_not_wake(pair, monkeypatch, waits_for):
    (one, other), _ = pair
    if waits_for == "room":
        while one._written.put(bytes(channel.PACKET_NBYTES)):
            pass
        one.unsent.append((bytes(channel.PACKET_NBYTES), ()))
        other._handle = lambda _: None
        waker, news = recorded(1, other.receive, pair, monkeypatch), (0, READ)
        sleeper, flag = recorded(0, one.begin_sleep, pair, monkeypatch), (0, STATE)
    else:
        waker, news = recorded(0, lambda: one.refuse(8), pair, monkeypatch), (0, WRITTEN)
        sleeper, flag = recorded(1, other.begin_sleep, pair, monkeypatch), (1, STATE)
    assert not [*losses(waker, sleeper, news, flag)]
    for which in range(2):  # each of the two fences is needed
        without = [
            [step for step in each if step[0] != FENCE or way != which] for way, each in enumerate((waker, sleeper))
        ]
        assert [*losses(*without, news, flag)]
