# SPDX-License-Identifier: Apache-2.0
"""Environment variables that hurt, for ``commrt doctor``: what each does here, and what to do.

Reasons: NCCL's and CUDA's lists of variables, torch's documentation of distributed training and of CUDA, docs/nccl.md.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec

from commrt.cli.findings import Finding, Verdict
from commrt.membership.launcher import VARIABLES

__all__ = ["HARMS", "Harm", "Surroundings", "harmful", "interfaces", "misspelt"]

CLOSE = 0.84
"""How alike two names must be for one to be the other, misspelt."""


def _is_on(value: str) -> bool:
    return value not in {"", "0"}


def _is_zero(value: str) -> bool:
    return value == "0"


def _is_one(value: str) -> bool:
    return value == "1"


def _is_set(_: str) -> bool:
    return True


def _hides_all(value: str) -> bool:
    return value.strip() in {"", "-1"}


def _means_no(value: str) -> bool:
    return value.lower() in {"false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Harm:
    """A variable, and what it does when its value is so."""

    name: str
    hurts: Callable[[str], bool]
    verdict: Verdict
    effect: str
    advice: str = "Unset it."


HARMS = (
    Harm("NCCL_COMM_BLOCKING", _is_zero, "problem", "calls return before they are done, which CuPy takes for an error"),
    Harm("NCCL_P2P_DISABLE", _is_on, "warning", "GPUs of a host exchange through its memory, not NVLink or PCIe"),
    Harm("NCCL_SHM_DISABLE", _is_on, "warning", "GPUs that cannot reach each other exchange over sockets on one host"),
    Harm("NCCL_IB_DISABLE", _is_on, "warning", "hosts exchange over IP sockets, also where there is InfiniBand"),
    Harm("NCCL_HOSTID", _is_set, "warning", "where it differs, ranks of one host exchange over the network"),
    Harm(
        "NCCL_MULTI_RANK_GPU_ENABLE", _is_on, "warning",
        "ranks may share a GPU (2.30.3 and later, experimental); where their kernels do not fit beside each other, "
        "they hang",
        "Unset it, but for tests.",
    ),
    Harm(
        "NCCL_ALGO", _is_set, "warning", "it chooses among NCCL's own collectives; commrt's exchanges are sends and "
        "receives, which it does not change",
        "Choose with attach(algorithm=...), and unset it.",
    ),
    Harm(
        "NCCL_NCHANNELS_PER_PEER", _is_set, "warning", "no NCCL that was looked at reads it",
        "NCCL_NCHANNELS_PER_NET_PEER is how many channels a send to another host uses.",
    ),
    Harm(
        "NCCL_GRAPH_MIXING_SUPPORT", _is_zero, "warning",
        "a communicator may not be used by a graph and without one at once, as attach(graphs=True) does",
    ),
    Harm("CUDA_LAUNCH_BLOCKING", _is_on, "warning", "each kernel is waited for: no exchange hides under backward()"),
    Harm("CUDA_VISIBLE_DEVICES", _hides_all, "warning", "it hides every GPU", "Unset it, if there are GPUs to use."),
    Harm(
        "CUDA_DEVICE_MAX_CONNECTIONS", _is_one, "warning",
        "streams share one queue to the GPU, so that an exchange waits behind the kernels of the backward pass",
    ),
    Harm(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "warning", "each tensor takes memory from the driver and gives it "
        "back, which waits for the GPU",
    ),
    Harm("TRITON_INTERPRET", _is_on, "warning", "Triton's kernels are interpreted on the host, not compiled"),
    Harm(
        "TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "warning",
        "torch's own groups compare each collective first, which makes DDP in a comparison slower than it is",
    ),
    Harm(
        "TORCH_NCCL_BLOCKING_WAIT", _is_on, "ok", "for torch's own groups: a world's waits end by COMMRT_TIMEOUT_S, or "
        "by init(timeout_s=...)", "",
    ),
    Harm(
        "COMMRT_NVTX", _means_no, "warning", "anything but 0 and nothing turns ranges for Nsight on",
        "Unset it, or set it to 0.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What values are compared with."""

    interfaces: Sequence[str]
    """Of this host's network."""
    cpus: float
    """That this process may use."""
    is_launched: bool
    """A launcher was recognised."""
    nccl_names: Callable[[], frozenset[str]]
    """The variables that the NCCL in this process reads; empty where there is none. Takes a second."""


def harmful(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """What of `env` hurts, or does nothing though it was meant to."""
    for harm in HARMS:
        if harm.name in env and harm.hurts(env[harm.name]):
            yield Finding(harm.name, harm.verdict, f"{_shown(env[harm.name])}: {harm.effect}", harm.advice)
    yield from _interfaces(env, around)
    yield from _nvtx(env)
    yield from _threads(env, around)
    yield from _half_a_launch(env, around)
    yield from _unknown(env, around)


def _shown(value: str) -> str:
    return f"set to {value}" if value else "set to nothing"


def _interfaces(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    there = ", ".join(around.interfaces)
    gloo = [name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if missing := [name for name in gloo if name not in around.interfaces]:
        detail = f"this host has no network interface {', '.join(missing)}: Gloo cannot connect to other hosts"
        yield Finding("GLOO_SOCKET_IFNAME", "problem", detail, f"Set it to one of {there}, or unset it.")
    nccl = env.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not any(_is_chosen(name, nccl) for name in around.interfaces):
        detail = f"{_shown(nccl)}, which leaves none of this host's network interfaces"
        yield Finding("NCCL_SOCKET_IFNAME", "problem", detail, f"Choose among {there}, or unset it.")


def _is_chosen(interface: str, pattern: str) -> bool:
    """As NCCL documents: prefixes, after ``=`` whole names, after ``^`` those that are not meant."""
    excluded, exact = pattern.startswith("^"), "=" in pattern[:2]
    names = [name for name in pattern.lstrip("^=").split(",") if name]
    matches = any(interface == name if exact else interface.startswith(name) for name in names)
    return matches is not excluded


def _nvtx(env: Mapping[str, str]) -> Iterator[Finding]:
    if _is_on(env.get("COMMRT_NVTX", "")) and find_spec("nvtx") is None:
        detail = "asks for ranges for Nsight, and the package nvtx is not installed: init() fails"
        yield Finding("COMMRT_NVTX", "problem", detail, "pip install 'commrt[profile]', or unset it.")


def _threads(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    text = env.get("OMP_NUM_THREADS")
    if text is None:
        return
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        detail = f"{_shown(text)} is no number of threads, and is ignored: each rank takes all processors"
        yield Finding("OMP_NUM_THREADS", "warning", detail, "Set it to processors / ranks of this host.")
    elif int(first) > around.cpus:
        detail = f"{_shown(text)}, and this process may use {around.cpus} processors: threads wait for each other"
        yield Finding("OMP_NUM_THREADS", "warning", detail, "Set it to processors / ranks of this host.")


def _half_a_launch(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in env]
    if given and not around.is_launched and not {"RANK", "WORLD_SIZE"} & env.keys():
        detail = f"{' and '.join(given)} set, RANK and WORLD_SIZE not: init() makes a world of one process"
        yield Finding(given[0], "warning", detail, "Set RANK and WORLD_SIZE too, or start with torchrun.")


def _unknown(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    for name in sorted(env):
        if name.startswith("COMMRT_") and name not in VARIABLES:
            nearest = get_close_matches(name, VARIABLES, 1, 0.0)[0]
            known = ", ".join(VARIABLES)
            yield Finding(name, "warning", f"commrt reads no such variable, only {known}", f"Was {nearest} meant?")
    own = [name for name in env if name.startswith("NCCL_")]
    if own and (known_names := around.nccl_names()):
        yield from misspelt(own, known_names)


def misspelt(names: Sequence[str], known: frozenset[str]) -> Iterator[Finding]:
    """Those of `names` that NCCL does not read, and that look like one it does.

    Others may be a plugin's, torch's of earlier years, or an image's: they are left alone.
    """
    listed = {harm.name for harm in HARMS}
    for name in sorted(set(names) - known - listed):
        if _is_torchs(name):
            continue
        if close := get_close_matches(name, known, 1, CLOSE):
            detail = "the NCCL in this process does not know that name"
            yield Finding(name, "warning", detail, f"Was {close[0]} meant?")


def _is_torchs(name: str) -> bool:
    """Names that torch read before it put TORCH_ in front of them, and still reads."""
    return re.fullmatch(r"NCCL_(BLOCKING_WAIT|ASYNC_ERROR_HANDLING|DESYNC_DEBUG|ENABLE_TIMING)", name) is not None


def interfaces() -> list[str]:
    """Of this host's network, by name; none where the platform does not tell."""
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:
        return []
