# SPDX-License-Identifier: Apache-2.0
"""Real launchers start real ranks, which find each other; on one host, and on two that are network namespaces."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from platform import machine

import pytest
from forked_python import forked_python
from launched_ranks import in_a_group, with_variables

from commrt.store.launcher import LAUNCHERS, launched
from commrt.testing.processes import free_port, run_processes

pytestmark = pytest.mark.processes
BIN = Path(sys.executable).parent
WORKER = Path(__file__).parent / "support" / "launched_ranks.py"
LIMIT_S = 110
OF_LAUNCHERS = {getattr(one, name) for one in LAUNCHERS for name in ("rank", "size", "local_rank", "local_size")}
ADDRESSES = ("10.213.8.1", "10.213.8.2")
IS_ROOT = os.geteuid() == 0
UNSHARE = ["unshare", "--net"] if IS_ROOT else ["unshare", "--map-root-user", "--net"]
ENTER = ["nsenter", "--net"] if IS_ROOT else ["nsenter", "--net", "--user", "--preserve-credentials"]


def environment():
    """Return this process's environment without variables of launchers."""
    kept = {name: value for name, value in os.environ.items() if name not in {*OF_LAUNCHERS, "GLOO_SOCKET_IFNAME"}}
    return kept | {"OMP_NUM_THREADS": "1"}


@cache
def has_namespaces():
    tries = f"{' '.join(UNSHARE)} sh -c 'ip link set lo up && nsenter --version'"
    return subprocess.run(["sh", "-c", tries], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def forked():
    """A folder with a `python` and a `torchrun` that need not import torch."""
    with forked_python() as folder:
        yield folder


@contextmanager
def host(unshare):
    """A network namespace while the block runs: a process in it, and what to put before a command to run it there."""
    command = [*unshare, "sh", "-c", "ip link set lo up && echo here && read _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout.readline() == "here\n"
        yield keeper.pid, [*ENTER, f"--target={keeper.pid}"]


@pytest.fixture
def two_hosts():
    """Joined by a cable: what to put before a command to run it on each."""
    with host(UNSHARE) as (_, first), host([*first, "unshare", "--net"]) as (second, to_second):
        cable = "ip link add eth type veth peer name eth netns"
        subprocess.run([*first, *cable.split(), str(second)], check=True)
        for to, address in zip((first, to_second), ADDRESSES, strict=True):
            for setting in (f"addr add {address}/24 dev eth", "link set eth up"):
                subprocess.run([*to, "ip", *setting.split()], check=True)
        yield first, to_second


@pytest.fixture
def here(request):
    """A host of our own, where the system gives one: launchers listen on all addresses of theirs."""
    return request.getfixturevalue("two_hosts")[0] if has_namespaces() else []


def run(*commands):
    """All at once; what one said is shown if it fails."""
    options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([str(word) for word in command], **options) for command in commands]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)
            process.stdout.close()


def reports(folder):
    """Return what each rank wrote about its worlds, in the order of ranks."""
    return sorted(json.loads(path.read_text()) for path in folder.iterdir())


def world_of(places, launcher, kind, total):
    """What ranks report of a world; a place is a rank's number, the size, and its number on its host."""
    return [[*place, launcher, kind, total] for place in places]


PAIR = [(0, 2, 0), (1, 2, 1)]
TWO_NODES = [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]


def of_one_world(*given):
    return [[report] for report in world_of(*given)]


@pytest.mark.slow
def test_torchrun_starts_ranks_that_meet_by_its_variables_or_in_a_group_of_torch_s(here, forked, tmp_path):
    launch = [forked / "torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    run([*here, *launch, WORKER, tmp_path, "1", "init", "gloo", "init"])
    ways = [world_of(PAIR, launcher, "shared", 3.0) for launcher in ("torchrun", "torch.distributed", "torchrun")]
    assert reports(tmp_path) == [list(worlds) for worlds in zip(*ways, strict=True)]


@pytest.mark.slow
def test_two_agents_of_torchrun_that_meet_by_c10d_are_one_world(here, forked, tmp_path):
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29400", "--rdzv-id", "7"]
    agent = [*here, forked / "torchrun", "--nnodes", "2", "--local-addr", "127.0.0.1", *meet]
    run(*[[*agent, WORKER, tmp_path, "1", "init"]] * 2)
    assert reports(tmp_path) == of_one_world([(0, 2, 0), (1, 2, 0)], "torchrun", "shared", 3.0)


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="needs util-linux, iproute2 and the right to make network namespaces")
def test_on_two_hosts_torchrun_s_ranks_share_memory_within_and_use_sockets_between(two_hosts, forked, tmp_path):
    """Though both hosts' names lead to the loopback, as Debian's do; also in groups of the backend."""
    store = ["--master-addr", ADDRESSES[0], "--master-port", "29500"]
    node = [forked / "torchrun", "--nnodes", "2", "--nproc-per-node", "2", *store]
    ways = [WORKER, tmp_path, "1", "init", "commrt"]
    run(*([*to, *node, "--node-rank", rank, *ways] for rank, to in enumerate(two_hosts)))
    launchers = "torchrun", "torch.distributed"
    worlds = [world_of(TWO_NODES, each, "shared and gloo", 10.0) for each in launchers]
    assert reports(tmp_path) == [list(each) for each in zip(*worlds, strict=True)]


OPEN_MPI = ["--allow-run-as-root", "--oversubscribe"]


def mpiruns():
    """What commrt calls it, and the command. The wheels both bring a `mpirun`: here goes what each has alone."""
    if (sys.platform, machine()) == ("linux", "x86_64"):  # as in pyproject.toml
        yield pytest.param("Open MPI", [BIN / "prterun", "--personality", "ompi", *OPEN_MPI], id="Open MPI's wheel")
        yield pytest.param("MPICH", [BIN / "mpiexec.hydra"], id="MPICH's wheel")
    mpirun = shutil.which("mpirun")
    if mpirun and Path(mpirun).parent != BIN:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
        name, options = ("Open MPI", OPEN_MPI) if "Open MPI" in said else ("MPICH", [])
        yield pytest.param(name, [mpirun, *options], id="the system's mpirun")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mpirun"), list(mpiruns()))
def test_two_jobs_of_mpirun_at_once_on_one_machine_do_not_meet(here, forked, tmp_path, name, mpirun):
    jobs = {0: tmp_path / "first", 10: tmp_path / "second"}
    commands = []
    for number, folder in jobs.items():
        folder.mkdir()
        # MPICH does not name its jobs, so only there each needs a port
        port = ["-genv", "MASTER_PORT", str(free_port())] if name == "MPICH" else []
        commands.append([*here, *mpirun, *port, "-n", "2", forked / "python", WORKER, folder, number, "init"])
    run(*commands)
    for number, folder in jobs.items():
        assert reports(folder) == of_one_world(PAIR, name, "shared", 2.0 * number + 1.0)


JOB = os.getpid()
"""Tests of another process have another one, and ports of their own."""


def task(rank, per_node="2", local_rank=None, **more):
    """What srun tells a task of a step of four on one node, or `more`."""
    said = {"PROCID": rank, "LOCALID": rank if local_rank is None else local_rank, "JOB_ID": JOB, "NTASKS": 4}
    step = {"STEP_ID": 0, "STEP_NUM_TASKS": 4, "STEP_TASKS_PER_NODE": per_node, "STEP_NODELIST": "gpu4"}
    return {f"SLURM_{name}": str(value) for name, value in {**said, **step, **more}.items()}


def test_the_tasks_of_a_slurm_step_on_two_hosts_meet_on_the_first_of_its_nodes():
    nodes = {"STEP_NODELIST": "127.0.0.[1-2]", "JOB_NODELIST": "no-such-host[1-9]"}
    tasks = [task(rank, "2(x2)", local, **nodes) for rank, _, local in TWO_NODES]
    outcomes = run_processes(4, with_variables, tasks)
    seen = world_of(TWO_NODES, "Slurm", "shared", 12.0)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, report) for report in seen]


def job_at_the_port_of(variables):
    """The number of another job for which the same port is derived."""
    port = launched(variables).port
    return next(job for job in count(JOB + 1) if launched(variables | {"SLURM_JOB_ID": str(job)}).port == port)


def test_ranks_of_two_jobs_that_derive_the_same_port_are_no_world():
    first, second = (task(rank, "2", STEP_NUM_TASKS=2) for rank in range(2))
    stranger = second | {"SLURM_JOB_ID": str(job_at_the_port_of(second))}
    outcomes = run_processes(2, with_variables, [first, stranger], 3)
    assert "DeadlineExceeded" in outcomes[0].error
    assert outcomes[1].error is not None


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_a_running_group_that_no_launcher_made_is_taken_over(scheme, tmp_path):
    method = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{free_port()}"}[scheme]
    outcomes = run_processes(2, in_a_group, method, 2)
    expected = world_of([(0, 2, 0), (1, 2, 0)], "torch.distributed", "shared", 2.0)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, each) for each in expected]


@pytest.mark.timeout(300)
def test_ray_train_s_workers_are_a_world():
    """Ray is no test dependency: it is large. Where it is installed, its example runs."""
    pytest.importorskip("ray.train")
    example = Path(__file__).parent.parent / "examples" / "ray_train.py"
    command = [sys.executable, example, "--workers", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks over shared, loss" in done.stdout
