# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: what one finding is, and the environment variables that cause trouble.

Sources of the table: the variable lists of NCCL and CUDA, torch's documentation, docs/nccl.md.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

from commrt.membership.launcher import VARIABLES

__all__ = [
    "HARMS", "Finding", "Harm", "Surroundings", "Verdict", "cpus", "guarded", "harmful", "interfaces", "known_names",
    "mapped", "misspelt", "names_in", "nccl_files",
]  # fmt: skip

Verdict = Literal["ok", "absent", "warning", "problem"]
"""absent: not installed, and not always needed; warning: works, but slowly or oddly; problem: fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
    """One sentence; empty if there is nothing to do."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The same as numbers and names, for JSON."""


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of `check`; an exception becomes a finding called `name`."""
    try:
        yield from check()
    except Exception as error:  # drivers and libraries raise errors of any type
        yield Finding(name, "problem", f"{type(error).__name__}: {error}", "Do what the message says.")


class Harm(NamedTuple):
    """An environment variable, and what it does if its value matches `values`."""

    name: str
    values: str
    """A regular expression for the whole value."""
    verdict: Verdict
    effect: str
    advice: str = "Unset it."

    def hurts(self, value: str) -> bool:
        """Return True if `value` is one of the harmful values."""
        return re.fullmatch(self.values, value, re.DOTALL | re.IGNORECASE) is not None


ON, ANY = "(?!0?$).*", ".*"
HARMS = (
    Harm("NCCL_COMM_BLOCKING", "0", "problem", "NCCL calls return early, which CuPy takes for an error"),
    Harm("NCCL_P2P_DISABLE", ON, "warning", "GPUs of a host exchange through host memory, not NVLink or PCIe"),
    Harm("NCCL_SHM_DISABLE", ON, "warning", "GPUs of a host that lack peer access exchange over sockets"),
    Harm("NCCL_IB_DISABLE", ON, "warning", "hosts exchange over IP sockets, even if there is InfiniBand"),
    Harm("NCCL_HOSTID", ANY, "warning", "ranks of one host use the network if their values differ"),
    Harm("NCCL_MULTI_RANK_GPU_ENABLE", ON, "warning", "ranks that share a GPU hang if their kernels do not fit on it "
         "together (experimental, NCCL 2.30.3 and later)", "Unset it, except in tests."),
    Harm("NCCL_ALGO", ANY, "warning", "selects NCCL's own collectives, but commrt uses sends and receives",
         "Choose with attach(algorithm=...), and unset it."),
    Harm("NCCL_NCHANNELS_PER_PEER", ANY, "warning", "no known NCCL version reads it",
         "To set the channels of a send to another host, use NCCL_NCHANNELS_PER_NET_PEER."),
    Harm("NCCL_GRAPH_MIXING_SUPPORT", "0", "warning", "a communicator cannot be used inside and outside of a CUDA "
         "graph, which attach(graphs=True) does"),
    Harm("CUDA_LAUNCH_BLOCKING", ON, "warning", "each kernel runs synchronously: no exchange overlaps backward()"),
    Harm("CUDA_VISIBLE_DEVICES", r"\s*(-1)?\s*", "warning", "hides every GPU", "Unset it to use GPUs."),
    Harm("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warning", "all streams share one hardware queue: an exchange waits for "
         "the kernels of the backward pass"),
    Harm("PYTORCH_NO_CUDA_MEMORY_CACHING", ON, "warning", "each tensor is allocated and freed by the driver, which "
         "waits for the GPU"),
    Harm("TRITON_INTERPRET", ON, "warning", "Triton interprets its kernels on the host instead of compiling them"),
    Harm("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "torch compares all ranks before each collective, which "
         "slows DDP down in comparisons"),
    Harm("TORCH_NCCL_BLOCKING_WAIT", ON, "ok", "affects torch's own groups only: commrt's timeout is COMMRT_TIMEOUT_S "
         "or init(timeout_s=...)", ""),
    Harm("COMMRT_NVTX", "false|no|off", "warning", "any value except 0 and the empty one turns NVTX ranges on",
         "Unset it, or set it to 0."),
)  # fmt: skip

QUOTA = Path("/sys/fs/cgroup/cpu.max")
CLOSE = 0.84
"""Similarity (0 to 1) from which an unknown name counts as a misspelling."""
OLD_NAMES_OF_TORCH = r"NCCL_(BLOCKING_WAIT|ASYNC_ERROR_HANDLING|DESYNC_DEBUG|ENABLE_TIMING)"
"""torch still reads these, which now begin with TORCH_."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts of this process that values of variables are compared with."""

    interfaces: Sequence[str]
    """Names of this host's network interfaces."""
    cpus: float
    """Processors that this process may use."""
    is_launched: bool
    """A launcher started this process."""
    nccl_names: Callable[[], frozenset[str]]
    """Returns the variables that the loaded NCCL reads, or an empty set. Takes a second."""


def harmful(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """Yield a finding for each variable of `env` that causes trouble or has no effect."""
    for harm in HARMS:
        if harm.name in env and harm.hurts(env[harm.name]):
            yield Finding(harm.name, harm.verdict, f"{_shown(env[harm.name])}: {harm.effect}", harm.advice)
    for check in (_interfaces, _threads, _launch_and_nvtx, _unknown):
        yield from check(env, around)


def _shown(value: str) -> str:
    return f"set to {value}" if value else "set to nothing"


def _interfaces(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    there, gloo, nccl = ", ".join(around.interfaces), env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME")
    if missing := [name for name in gloo.split(",") if name and name not in around.interfaces]:
        detail = f"this host has no network interface {', '.join(missing)}: Gloo cannot connect to other hosts"
        yield Finding("GLOO_SOCKET_IFNAME", "problem", detail, f"Set it to one of {there}, or unset it.")
    if nccl and not any(_is_chosen(name, nccl) for name in around.interfaces):
        detail = f"{_shown(nccl)}, which matches none of this host's network interfaces"
        yield Finding("NCCL_SOCKET_IFNAME", "problem", detail, f"Choose among {there}, or unset it.")


def _is_chosen(interface: str, pattern: str) -> bool:
    """Return True if NCCL would use `interface`: prefixes, whole names after ``=``, exclusions after ``^``."""
    excluded, exact = pattern.startswith("^"), "=" in pattern[:2]
    names = [name for name in pattern.lstrip("^=").split(",") if name]
    matches = any(interface == name if exact else interface.startswith(name) for name in names)
    return matches is not excluded


def _threads(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    text, wrong = env.get("OMP_NUM_THREADS"), None
    if text is None:
        return
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        wrong = "which is not a number of threads: each rank uses all processors"
    elif int(first) > around.cpus:
        wrong = f"but this process may use {around.cpus} processors: threads wait for each other"
    if wrong:
        advice = "Set it to the number of processors divided by the number of ranks on this host."
        yield Finding("OMP_NUM_THREADS", "warning", f"{_shown(text)}, {wrong}", advice)


def _launch_and_nvtx(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in env]
    if given and not around.is_launched and not {"RANK", "WORLD_SIZE"} & env.keys():
        detail = f"{' and '.join(given)} set, RANK and WORLD_SIZE not: commrt.init() makes a world of one process"
        yield Finding(given[0], "warning", detail, "Set RANK and WORLD_SIZE too, or start with torchrun.")
    if env.get("COMMRT_NVTX", "0") not in {"", "0"} and find_spec("nvtx") is None:
        detail = "asks for NVTX ranges, but the package nvtx is not installed: commrt.init() fails"
        yield Finding("COMMRT_NVTX", "problem", detail, "pip install 'commrt[profile]', or unset it.")


def _unknown(env: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    for name in sorted(env):
        if name.startswith("COMMRT_") and name not in VARIABLES:
            nearest = get_close_matches(name, VARIABLES, 1, 0.0)[0]
            detail = f"commrt does not read this variable, only {', '.join(VARIABLES)}"
            yield Finding(name, "warning", detail, f"Did you mean {nearest}?")
    own = [name for name in env if name.startswith("NCCL_")]
    if own and (known := around.nccl_names()):
        yield from misspelt(own, known)


def misspelt(names: Iterable[str], known: frozenset[str]) -> Iterator[Finding]:
    """Yield a finding for each of `names` that resembles one of `known`.

    Other unknown names may belong to a plugin, to old versions of torch, or to a container image.
    """
    for name in sorted({*names} - known - {harm.name for harm in HARMS}):
        close = get_close_matches(name, known, 1, CLOSE)
        if close and not re.fullmatch(OLD_NAMES_OF_TORCH, name):
            yield Finding(name, "warning", "the loaded NCCL does not read this variable", f"Did you mean {close[0]}?")


def interfaces() -> list[str]:
    """Return the names of this host's network interfaces; none if the platform does not list them."""
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:
        return []


def cpus() -> float:
    """Return how many processors this process may use, by its affinity and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        most, period = QUOTA.read_text(encoding="ascii").split()  # such as "150000 100000" or "max 100000"
        return min(allowed, inf if most == "max" else int(most) / int(period))
    except (OSError, ValueError):
        return allowed


def nccl_files() -> list[str]:
    """Return the files of NCCL that this process has loaded; on Linux."""
    maps = Path("/proc/self/maps")
    return mapped(maps.read_text(encoding="utf-8")) if maps.exists() else []


def mapped(maps: str) -> list[str]:
    r"""Return the files of NCCL in the text of a ``/proc/self/maps``.

    >>> mapped("7f0-7f1 r-xp 00000000 08:01 9  /a/libnccl.so.2\n7f1-7f2 r--p 00000000 08:01 9  /a/libnccl.so.2\n")
    ['/a/libnccl.so.2']
    """
    return sorted(set(re.findall(r"\s(/\S*libnccl\.so\S*)$", maps, re.MULTILINE)))


def names_in(library: str) -> frozenset[str]:
    """Return the strings ``NCCL_...`` in a library, which include all variables that it reads."""
    with Path(library).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return frozenset(name.decode() for name in re.findall(rb"NCCL_[A-Z0-9_]+(?=\x00)", content))


def known_names() -> frozenset[str]:
    """Return the variables that the loaded NCCL reads; empty if none is loaded."""
    copies = nccl_files()
    return names_in(copies[0]) if copies else frozenset()
