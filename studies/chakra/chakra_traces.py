# SPDX-License-Identifier: Apache-2.0
"""A schedule as execution traces in the schema of MLCommons Chakra, one per rank, for other simulators.

A rank's sends and receives of a step depend on all that the rank did in the last step in which it was not idle.
Compute nodes add, or mix, what was received. They follow all sends and receives of the step, one after the other, in
order of ranks. So transfers begin when `commrt.pricing.price` lets them begin.

Of two nodes of a step, the send has the lower number. A simulator that runs one transfer of a rank at a time, in order,
then does not wait for a message that is still to be sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import count, groupby
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.program import chunk_bounds
from commrt.schedule import COPY, Combine, IntArray, Schedule, Step, require_valid
from commrt.tools.planning.wires import GRADIENT_NBYTES

__all__ = ["VALUES", "Node", "NodeType", "Trace", "traces"]

VERSION = "0.0.4"
"""Of the schema, as Chakra's own tools write it."""
MOST_MESSAGES = 500_000
VALUES = {
    "is_cpu_op": "bool_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "buffer_offset": "uint64_val",
    "schedule": "string_val",
    "ranks": "int32_val",
}
"""The field of an `AttributeProto` that holds each attribute's value."""


class NodeType(IntEnum):
    """Kinds of nodes, with the names and numbers of the schema."""

    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6


@dataclass(frozen=True, slots=True)
class Node:
    """One send, receive or addition of a rank."""

    id: int
    name: str
    type: NodeType
    data_deps: tuple[int, ...]
    """Nodes of this rank that must have finished before."""
    duration_micros: int
    """Of computing, in whole microseconds; 0 for what is sent or received, and if adding takes no time."""
    attributes: Mapping[str, int]

    def record(self) -> dict[str, Any]:
        """Return the node with the field names of the schema."""
        return {
            "id": self.id,
            "name": self.name,
            "type": self.type.name,
            "data_deps": list(self.data_deps),
            "duration_micros": self.duration_micros,
            "attr": _attr({"is_cpu_op": False} | dict(self.attributes)),
        }


class Trace(NamedTuple):
    """What one rank does, in an order that respects all dependencies."""

    rank: int
    attributes: Mapping[str, int | str]
    nodes: tuple[Node, ...]

    def text(self) -> str:
        """Return the trace as a JSON document with one node per line."""
        metadata = {"version": VERSION, "attr": _attr(self.attributes)}
        nodes = ",\n".join(json.dumps(node.record()) for node in self.nodes)
        return f'{{"global_metadata": {json.dumps(metadata)},\n"nodes": [\n{nodes}\n]}}\n'


def traces(schedule: Schedule, nbytes: int, cluster: Cluster | None = None) -> Iterator[Trace]:
    """Return the traces of all ranks, for a buffer of `nbytes` of fp32 values; raises `UsageError`.

    Each message has a tag of its own, `comm_tag`, at both ends. `buffer_offset` is where its data lie in the buffer, in
    bytes. Adding takes as long as on `cluster`, or no time.

    >>> from commrt.algorithms.ring import all_reduce
    >>> for node in next(traces(all_reduce(2), 8)).nodes:
    ...     print(node.id, node.type.name, node.data_deps, node.name)
    0 COMM_SEND_NODE () send 0->1 [1:2) of step 0
    1 COMM_RECV_NODE () recv 1->0 [0:1) of step 0
    2 COMP_NODE (0, 1) add 1->0 [0:1) of step 0
    3 COMM_SEND_NODE (2,) send 0->1 [0:1) of step 1
    4 COMM_RECV_NODE (2,) recv 1->0 [1:2) of step 1
    """
    if not 1 <= nbytes < 2**63:
        raise UsageError(f"a buffer of {nbytes} bytes cannot be traced: give a number from 1 on")
    moves = _Moves.of(schedule, nbytes)
    attributes: dict[str, int | str] = {"schedule": schedule.name, "ranks": schedule.ranks, "tensor_size": nbytes}
    return (Trace(rank, attributes, tuple(_nodes(moves.of_rank(rank), cluster))) for rank in range(schedule.ranks))


class _Message(NamedTuple):
    """A transfer as one of its ranks sees it."""

    step: int
    tag: int
    src: int
    dst: int
    lo: int
    hi: int
    combine: int
    offset: int
    nbytes: int
    is_sent: bool


@dataclass(frozen=True, slots=True)
class _Moves:
    """All messages of a schedule, in order; those without bytes are left out."""

    step: Step
    numbers: IntArray
    """[messages] the step of each one."""
    bounds: IntArray
    """[chunks + 1] where chunks begin, in bytes."""

    @classmethod
    def of(cls, schedule: Schedule, nbytes: int) -> _Moves:
        bounds = np.array(chunk_bounds(nbytes, schedule.chunks, GRADIENT_NBYTES), dtype=np.int64)
        steps, room = [Step.of([], [], [], [], COPY)], MOST_MESSAGES
        for step in schedule.checked_steps():
            room -= len(step)
            if room < 0:
                raise UsageError(
                    f"{schedule.name} on {schedule.ranks} ranks has more than {MOST_MESSAGES:,} messages: trace fewer "
                    "ranks, or an algorithm with fewer steps"
                )
            sorted_ = require_valid(step, schedule).canonical()
            is_message = (bounds[sorted_.hi] > bounds[sorted_.lo]) & (sorted_.src != sorted_.dst)
            steps.append(sorted_.rows(is_message))
        columns = zip(*(step.columns for step in steps), strict=True)
        numbers = np.repeat(np.arange(len(steps)) - 1, [len(step) for step in steps])
        return cls(Step(*map(np.concatenate, columns)), numbers, bounds)

    def of_rank(self, rank: int) -> Iterator[_Message]:
        """Yield the messages that `rank` sends or receives."""
        mine = np.flatnonzero((self.step.src == rank) | (self.step.dst == rank))
        step = self.step.rows(mine)
        begin, end = self.bounds[step.lo], self.bounds[step.hi]
        columns = (self.numbers[mine], mine, *step.columns[:5], begin, end - begin, step.src == rank)
        return map(_Message, *(column.tolist() for column in columns))


def _nodes(messages: Iterator[_Message], cluster: Cluster | None) -> Iterator[Node]:
    """Yield the nodes of one rank, step by step."""
    ids, before = count(), tuple[int, ...]()
    for _, group in groupby(messages, key=lambda message: message.step):
        ordered = sorted(group, key=lambda message: not message.is_sent)
        exchanged = [_exchange(next(ids), message, before) for message in ordered]
        yield from exchanged
        before = tuple(node.id for node in exchanged)
        for message in ordered:
            if not message.is_sent and message.combine != COPY:
                added = _addition(next(ids), message, before, cluster)
                yield added
                before = (added.id,)


def _exchange(number: int, message: _Message, after: tuple[int, ...]) -> Node:
    attributes = {
        "comm_size": message.nbytes,
        "comm_src": message.src,
        "comm_dst": message.dst,
        "comm_tag": message.tag,
        "buffer_offset": message.offset,
    }
    kind = NodeType.COMM_SEND_NODE if message.is_sent else NodeType.COMM_RECV_NODE
    return Node(number, _name("send" if message.is_sent else "recv", message), kind, after, 0, attributes)


def _addition(number: int, message: _Message, after: tuple[int, ...], cluster: Cluster | None) -> Node:
    attributes = {
        "num_ops": ceil(message.nbytes / GRADIENT_NBYTES),
        "tensor_size": message.nbytes,
        "comm_tag": message.tag,
        "buffer_offset": message.offset,
    }
    name = _name(Combine(message.combine).name.lower(), message)
    add_s = 0.0 if cluster is None else cluster.add_s(message.nbytes)
    return Node(number, name, NodeType.COMP_NODE, after, round(1e6 * add_s), attributes)


def _name(verb: str, message: _Message) -> str:
    return f"{verb} {message.src}->{message.dst} [{message.lo}:{message.hi}) of step {message.step}"


def _attr(attributes: Mapping[str, int | str]) -> list[dict[str, Any]]:
    return [{"name": name, VALUES[name]: value} for name, value in attributes.items()]
