# SPDX-License-Identifier: Apache-2.0
"""How ranks become one NCCL communicator: all come to the store first.

A wait inside NCCL, for one who does not come, has no deadline and cannot be ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from typing import NamedTuple

import torch
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, TransportError, UsageError
from commrt.membership.launcher import nccl_variable
from commrt.membership.store_client import parse, parse_int, parse_list, require, run_within
from commrt.threads.streams import Streams
from commrt.transport.binding import Binding, Communicator

__all__ = ["join"]

SHARES_GPUS = 23003
"""The first NCCL that lets ranks share a GPU, where NCCL_MULTI_RANK_GPU_ENABLE=1."""

NONE = "none"
"""In place of an id."""


class _Claim(NamedTuple):
    nccl: int
    gpu: str | None
    """What two ranks must not have in common."""


def join(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    streams: Streams,
    binding: Binding,
) -> Communicator:
    """The communicator of `members`, on `device`.

    Raises `DeadlineExceeded` with the ranks that did not come, `DisagreementError` if they came with different NCCLs,
    `UsageError` if two chose one GPU, `TransportError` for what NCCL says.
    """
    claims = _claims(store, rank, members, timeout_s, _Claim(binding.get_version(), _gpu(device)))
    _require_one_version(claims)
    _require_a_gpu_each(claims)
    number = _number(store, rank, members[0], timeout_s, binding)

    def construct() -> Communicator:
        streams.use()
        return binding.NcclCommunicator(len(members), number, members.index(rank))

    try:
        return run_within(timeout_s, construct)
    except TimeoutError as error:
        what = f"all ranks came, but NCCL did not connect them within {timeout_s:g} s: run with NCCL_DEBUG=INFO"
        raise DeadlineExceeded(what, Place(rank)) from error
    except RuntimeError as error:
        raise TransportError(f"NCCL made no communicator ({error}): run with NCCL_DEBUG=WARN", Place(rank)) from error


def _number(store: Store, rank: int, first: int, timeout_s: float, binding: Binding) -> bytes:
    """What rank `first` makes, and tells the others."""
    if rank == first:
        try:
            store.set("id", _unique_id(binding).hex())
        except BaseException:
            store.set("id", NONE)
            raise
    try:
        store.wait(["id"], timedelta(seconds=timeout_s))
        said = store.get("id")
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"no word from rank {first} within {timeout_s:g} s: look at its output", Place(rank, first)
        ) from error
    if said == NONE.encode():
        raise PeerLost(f"rank {first} could not make a communicator: look at its output", Place(rank, first))
    return parse("id", said, lambda each: bytes.fromhex(each.decode()))


def _unique_id(binding: Binding) -> bytes:
    number = binding.get_unique_id()
    if not isinstance(number, bytes):
        raise UsageError(
            "this CuPy is older than 14, and names communicators differently: pip install 'cupy-cuda13x>=14'"
        )
    return number


def _gpu(device: torch.device) -> str | None:
    """Its name among all hosts; where NCCL_HOSTID is set, NCCL takes that for the host."""
    if device.type != "cuda":
        return None
    return f"{nccl_variable('HOSTID') or ''} {torch.cuda.get_device_properties(device).uuid}"


def _claims(store: Store, rank: int, members: Sequence[int], timeout_s: float, own: _Claim) -> dict[int, _Claim]:
    """What each member came with."""
    store.set(f"ready/{rank}", json.dumps(own))
    keys = {peer: f"ready/{peer}" for peer in members}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [peer for peer, key in keys.items() if not store.check([key])]
        raise DeadlineExceeded(
            f"ranks {missing} did not come within {timeout_s:g} s: start all of them, with the same world size, and "
            "look at the output of those that are missing",
            Place(rank, next(iter(missing), None)),
        ) from error
    return {peer: parse(key, store.get(key), _claim) for peer, key in keys.items()}


def _claim(said: bytes) -> _Claim:
    nccl, gpu = parse_list(said, 2)
    require(isinstance(gpu, str | None))
    return _Claim(parse_int(nccl), gpu)


def _require_one_version(claims: Mapping[int, _Claim]) -> None:
    versions = {rank: claim.nccl for rank, claim in claims.items()}
    first = next(iter(versions))
    other = next((rank for rank, version in versions.items() if version != versions[first]), None)
    if other is not None:
        raise DisagreementError(
            f"rank {other} runs NCCL {versions[other]} and rank {first} NCCL {versions[first]}: install the same one "
            "everywhere"
        )


def _require_a_gpu_each(claims: Mapping[int, _Claim]) -> None:
    if next(iter(claims.values())).nccl >= SHARES_GPUS and nccl_variable("MULTI_RANK_GPU_ENABLE") == "1":
        return
    for (one, first), (other, second) in combinations(claims.items(), 2):
        if first.gpu is not None and first.gpu == second.gpu:
            raise UsageError(
                f"ranks {one} and {other} chose the same GPU, {first.gpu}: move each model to its rank's world.device "
                "before it is attached"
            )
