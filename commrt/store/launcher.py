# SPDX-License-Identifier: Apache-2.0
"""Rank, world size and the store's address, from the variables that a launcher has set.

Pure functions of the environment. Known launchers: torchrun (and anything that sets RANK and
WORLD_SIZE), Open MPI, MPICH and its relatives, Slurm's srun.

In a Slurm job, batch scripts and shells also see most of Slurm's variables (SLURM_PROCID=0,
SLURM_NTASKS), although Slurm started no other rank. So only the variables of a job step count. A
step of one task is no launch either: it may be a shell (salloc, ``srun --pty bash``) from which
somebody starts workers.

Without MASTER_PORT the port is derived from a value that differs between jobs of one machine, if
the launcher sets one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from commrt.errors import UsageError
from commrt.store.environment import ENVIRONMENT

LOOPBACK = "127.0.0.1"
"""The address of rank 0 if all ranks are on its host."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process's place in a world, and where the world's store listens."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    """0 if the launcher does not say."""
    address: str
    port: int
    store_exists: bool = False
    """The launcher itself holds the store (torchrun's agent); otherwise rank 0 does."""
    attempt: int = 0
    """How often the launcher has restarted the workers against the same store."""
    job: str = ""
    """What the port was derived from; empty if MASTER_PORT says it."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    """Whose values together differ between jobs of one machine, to derive a port from."""
    sign: str
    """Must be set too: tells apart launchers that share `rank`, and a Slurm step from its job."""


SLURM = _Launcher(
    "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NUM_TASKS",
)  # fmt: skip
STEP = re.compile(r"[0-9]{1,10}")
NUMBER = re.compile(r"\s*([0-9]{1,18})\s*", re.ASCII)
COUNT = re.compile(r"\s*([0-9]{1,18})(\(x[0-9]+\))?(,[0-9(),x]*)?\s*", re.ASCII)
"""Slurm writes those of several nodes as 4(x2),3."""
HOST = re.compile(r"[^\s\[\]]+")
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers srun's steps from 0; those of batch scripts and salloc's shell are above this."""
LAUNCHERS = (
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID",),
        "RANK",
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
        "OMPI_COMM_WORLD_RANK",
    ),
    _Launcher(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("PMI_JOBID",),
        "MPI_LOCALRANKID",
    ),
    SLURM,
    _Launcher(
        "PMI",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_LOCAL_RANK",
        "PMI_LOCAL_SIZE",
        ("PMI_JOBID",),
        "PMI_RANK",
    ),
)
"""In order of precedence.

mpirun inside a Slurm job starts its helpers with srun, so that its processes find the variables of
a step as well; ``srun --mpi=pmi2`` sets PMI_RANK as well, but not what MPICH's own mpiexec sets.
"""


def launched(env: Mapping[str, str] = ENVIRONMENT, up_to: int | None = None) -> Launch | None:
    """Return the launch that `env` describes, or None if no launcher is recognised.

    With `up_to`, ranks from the size on to `up_to` - 1 come later than the others.

    Raises `UsageError` for variables that contradict each other or are no numbers.

    >>> address = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    >>> launched({"RANK": "1", "WORLD_SIZE": "4", **address}).rank
    1
    >>> launched({}) is None
    True
    """
    known = _recognised(env)
    if known is None:
        if env.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK is not: set both, or neither"
            )
        return None
    if known.size not in env:
        raise UsageError(
            f"{known.rank} is set but {known.size} is not: set both, or neither to run as one"
            " process"
        )
    rank = _integer(env, known.rank)
    size = _integer(env, known.size)
    if rank >= max(size, up_to or 0):
        last = "size-1" if up_to is None else f"up_to-1, and up_to={up_to}"
        raise UsageError(
            f"{known.rank}={rank} and {known.size}={size} contradict each other: ranks are"
            f" 0..{last}"
        )
    local_size = _integer(env, known.local_size, 0, COUNT if known is SLURM else NUMBER)
    address = env.get("MASTER_ADDR") or _address(known, env, size, local_size)
    if not HOST.fullmatch(address):
        raise UsageError(
            f"MASTER_ADDR={address!r:.80} is no address: set it to the name or number of rank 0's"
            " host"
        )
    job = "" if "MASTER_PORT" in env else ".".join(env[name] for name in known.job if env.get(name))
    port = _integer(env, "MASTER_PORT", _port(job))
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} is no port: choose one in 1..65535")
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    attempt = _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
    place = _integer(env, known.local_rank, 0)
    # Slurm's is that of its first node
    if known.local_size in env and known is not SLURM and place >= local_size:
        raise UsageError(
            f"{known.local_rank}={place} and {known.local_size}={local_size} contradict each other"
        )
    return Launch(
        known.name,
        rank=rank,
        size=size,
        local_rank=place,
        local_size=local_size,
        address=address,
        port=port,
        store_exists=agent,
        attempt=attempt,
        job=job,
    )


def _integer(
    env: Mapping[str, str], name: str, default: int | None = None, form: re.Pattern[str] = NUMBER
) -> int:
    text = env.get(name, "" if default is None else str(default))
    number = form.fullmatch(text)
    if number is None:
        raise UsageError(
            f"{name}={text!r:.80} is no number: the launcher must set it to 0, 1, 2, ..."
        )
    return int(number[1])


def _recognised(env: Mapping[str, str]) -> _Launcher | None:
    """Return this process's launcher; None in a Slurm job outside srun's steps of several tasks."""
    known = next((one for one in LAUNCHERS if one.rank in env and one.sign in env), None)
    if known is not SLURM:
        return known
    step = env.get("SLURM_STEP_ID", "")
    is_srun = STEP.fullmatch(step) is not None and int(step) < FIRST_SPECIAL_STEP
    return known if is_srun and _integer(env, SLURM.size) != 1 else None


def _address(launcher: _Launcher, env: Mapping[str, str], size: int, local_size: int) -> str:
    if size in (1, local_size):
        return LOOPBACK
    if hosts := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST"):
        return _first_host(hosts)  # mpirun inside a Slurm job puts rank 0 there too
    raise UsageError(
        f"{launcher.name} started {size} ranks but nothing says where rank 0 is: "
        "set MASTER_ADDR to its host name (and MASTER_PORT to a free port) for all ranks"
    )


def _first_host(nodelist: str) -> str:
    """The first host of a Slurm node list; raises `UsageError` if that is none.

    >>> _first_host("gpu[003-007,9],login1"), _first_host("a1,a2"), _first_host("r[1-2]n[03,05]")
    ('gpu003', 'a1', 'r1n03')
    """
    head = re.split(r",(?![^\[]*\])", nodelist)[0]  # at a comma outside brackets
    first = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", head)
    if not HOST.fullmatch(first):
        raise UsageError(
            f"Slurm's node list {nodelist!r:.80} begins with no host: set MASTER_ADDR to that of"
            " rank 0"
        )
    return first


def _port(job: str) -> int:
    """A port that all ranks of a job derive alike and two jobs of one machine hardly share."""
    return 20000 + zlib.crc32(job.encode()) % 10000 if job else 29500


def local_rank() -> int:
    """Return this rank's number on its host, as the launcher says; 0 if it says nothing."""
    with suppress(UsageError):
        if (launch := launched()) is not None:
            return launch.local_rank
    return 0
