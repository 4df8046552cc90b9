# SPDX-License-Identifier: Apache-2.0
"""What other libraries call what commrt has: hints for who types a name that is not there.

torch.distributed, DistributedDataParallel, Horovod and Accelerate. A hint is a part of an
`AttributeError`, so `hasattr` stays False; reading other attributes costs nothing. Constant tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

C = TypeVar("C", bound=type)

IN_WORLD = {
    "all_gather": "all_gather_object(obj), or run(schedule, tensor)",
    "all_to_all": "run(schedule, tensor)",
    "allgather_object": "all_gather_object(obj)",
    "allreduce": "all_reduce(tensor)",
    "broadcast_object_list": "broadcast_object(obj)",
    "destroy_process_group": "close()",
    "gather": "all_gather_object(obj), or run(schedule, tensor)",
    "gather_object": "all_gather_object(obj)",
    "get_local_rank": "local_rank",
    "get_rank": "rank",
    "get_world_size": "size",
    "is_main_process": "rank == 0",
    "num_processes": "size",
    "process_index": "rank",
    "recv": "run(schedule, tensor)",
    "reduce": "run(schedule, tensor), or all_reduce(tensor)",
    "reduce_scatter": "run(schedule, tensor)",
    "scatter": "run(schedule, tensor)",
    "send": "run(schedule, tensor)",
    "shutdown": "close()",
    "wait_for_everyone": "barrier()",
    "world_size": "size",
}
"""By name: what a `World` has instead."""
IN_REPLICA = {
    "eval": "model.eval()",
    "forward": "model(...)",
    "module": "model",
    "named_parameters": "model.named_parameters()",
    "parameters": "model.parameters()",
    "require_backward_grad_sync": "no_sync()",
    "synchronize": "drain()",
    "train": "model.train()",
    "zero_grad": "model.zero_grad()",
}
"""By name: what a `Replica` has instead."""
WORLD_HAS = (
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "device",
    "local_rank",
    "rank",
    "size",
)
REPLICA_HAS = ("join", "no_sync", "ride", "weigh")
ATTACH = "commrt.attach(model, optimizer)"
IN_COMMRT = {
    **{name: f"world.{found}, with world = commrt.init()" for name, found in IN_WORLD.items()},
    **{name: f"world.{name}, with world = commrt.init()" for name in WORLD_HAS},
    **{name: f"replica.{name}, with replica = {ATTACH}" for name in REPLICA_HAS},
    **dict.fromkeys(("DDP", "DistributedDataParallel"), ATTACH),
    **dict.fromkeys(("DistributedOptimizer", "broadcast_parameters", "prepare"), ATTACH),
    "broadcast_optimizer_state": ATTACH,
    "DistributedSampler": "commrt.Shares(data, batch_size)",
    "get_world": "commrt.current()",
    "init_process_group": "commrt.init()",
    "is_initialized": "commrt.current(), which raises UsageError before init()",
}
"""By name: what the package has instead."""


class _Absent:
    """An attribute that is not there, and says what is."""

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead

    def __get__(self, _: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}: use {self._instead}"
        )


def hinting(owner: str, names: Mapping[str, str]) -> Callable[[C], C]:
    """Return a decorator of a class without the attributes `names`, which are said to be `owner`'s
    others.
    """

    def hint(kind: C) -> C:
        for name, instead in names.items():
            setattr(kind, name, _Absent(name, f"{owner}.{instead}"))
        return kind

    return hint
