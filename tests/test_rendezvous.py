# SPDX-License-Identifier: Apache-2.0
"""A process finds its place from what its launcher left; ranks meet at one store, and one that is gone is an error."""

import os
import signal
import socket

import pytest
import rendezvous_ranks
import torch.distributed as dist
from cases import for_each
from torch.distributed import HashStore

import commrt
from commrt.errors import DeadlineExceeded, TransportError, UsageError
from commrt.store import environment, name_server
from commrt.store.addresses import is_loopback
from commrt.store.launcher import Launch, launched
from commrt.store.rendezvous import listen, meet
from commrt.testing.processes import free_port, run_processes
from commrt.transport.names import chosen_transport

LIMIT_S = 80.0


def launch(rank, port, address="127.0.0.1"):
    return Launch("torchrun", rank, 2, rank, 2, address, port)


def free_port_at(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            pytest.skip(f"no {address} on this machine: {error}")
        return probe.getsockname()[1]


def test_a_port_where_something_listens_but_never_answers_is_an_error():
    says = r"did not answer as a store within 0\.3 s.* \[rank 1, peer 0\]"
    with listen() as silent, pytest.raises(DeadlineExceeded, match=says):
        meet(launch(1, silent.getsockname()[1]), 0.3)


@for_each(
    ("address", "why"), [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "not known|failure in name")]
)
def test_an_address_where_nobody_listens_is_an_error_that_says_why(address, why):
    says = rf"no store at {address}:\d+ within \d\.\d s: .*({why})"
    with pytest.raises(DeadlineExceeded, match=says):
        meet(launch(1, free_port(), address), 0.3)


@for_each(("slow_s", "warnings"), [(1e6, 0), (0.0, 1)])
def test_a_slow_reverse_lookup_is_named_in_the_log(monkeypatch, caplog, slow_s, warnings):
    monkeypatch.setattr(name_server, "SLOW_LOOKUP_S", slow_s)
    name_server._time_lookup("127.0.0.1")
    assert ["to look up 127.0.0.1" in record.getMessage() for record in caplog.records] == [True] * warnings


def test_a_port_that_is_taken_is_an_error_at_once():
    with listen() as other, pytest.raises(TransportError, match="is taken on this machine: set MASTER_PORT"):
        meet(launch(0, other.getsockname()[1]), 60)


LOOPBACKS = {
    "127.0.0.1": ("127.0.0.1", "127.0.0.2"),
    "localhost": ("127.0.0.1", "127.0.0.2"),
    "127.0.0.9": ("127.0.0.9", "127.0.0.1"),
    "::1": ("::1", "127.0.0.1"),
}
"""Where the store listens, and where it would listen too if it did on all addresses."""


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_store_on_the_loopback_is_for_this_machine_alone(address):
    ours, other = LOOPBACKS[address]
    port = free_port_at(ours)
    meet(launch(0, port, address), 5)
    meet(launch(1, port, address), 5).set("found", "")
    with socket.create_connection((ours, port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, port), timeout=5)


def test_only_addresses_that_nobody_else_can_reach_are_the_loopback():
    assert all(map(is_loopback, [*LOOPBACKS, "127.255.255.254", "LocalHost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "::", "fe80::1", "128.0.0.1", "gpu3", "localhost.example"]))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("signal_number", "says"),
    [
        pytest.param(signal.SIGSTOP, "DeadlineExceeded: timed out: no answer from ranks [0]", marks=pytest.mark.slow),
        (signal.SIGKILL, "PeerLost: the peer is gone"),
    ],
    ids=["stopped", "killed"],
)
def test_a_store_that_goes_away_during_a_question_is_named(signal_number, says):
    def strike(rank, message, process):
        os.kill(process.pid, signal_number)
        return True

    outcomes = run_processes(3, rendezvous_ranks.ask_without, 0, [3.0] * 3, limit_s=LIMIT_S, on_message=strike)
    for other in outcomes[1:]:
        assert str(other.error).startswith(says)
        assert f"[rank {other.rank}, peer 0, step 0, bucket lunch" in other.error


@pytest.mark.processes
def test_the_holder_of_the_store_outlives_its_own_deadline_for_the_others_to_read_why():
    timeouts_s = [1.0, 30.0, 60.0]
    outcomes = run_processes(
        3, rendezvous_ranks.ask_without, 2, timeouts_s, limit_s=LIMIT_S, on_message=lambda *_: True
    )
    assert str(outcomes[0].error).startswith("DeadlineExceeded: timed out: no answer from ranks [2] within 1 s")
    assert "Rank 0 saw DeadlineExceeded: timed out: no answer from ranks [2] within 1 s" in str(outcomes[1].error)


ORDERS = {
    "world next world next world group end world": ["torchrun"] * 4,
    "world end group world end world": ["torchrun", "torch.distributed", "torchrun"],
    "group world end group end world group": ["torch.distributed", "torchrun"],
}


@pytest.mark.processes
@pytest.mark.parametrize("order", ORDERS)
def test_worlds_and_torch_s_groups_meet_at_the_same_port_in_any_order(tmp_path, order):
    ends = str(tmp_path / "ends")
    outcomes = run_processes(2, rendezvous_ranks.worlds_and_groups, ends, *order.split(), limit_s=LIMIT_S)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, ORDERS[order])] * 2


AT = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4321"}
PLACE = {"RANK": "3", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in PLACE.items()}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", "SLURM_NODEID": "0"}
"""What a batch script finds, on the first node of its job."""
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
SLURM = BATCH | STEP | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "77.0", "PMI_FD": "9"}
"""What srun --mpi=pmi2 adds."""
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
"""What the mpiexec of MPICH and of Intel MPI sets."""
PALS = {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
ANOTHER_STEP = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_STEP_ID": "12"}
HERE = ("10.1.2.3", 4321)


@for_each(
    ("env", "launch"),
    [
        (TORCHRUN, Launch("torchrun", 2, 4, 0, 2, *HERE)),
        (TORCHRUN | AGENT, Launch("torchrun", 2, 4, 0, 2, *HERE, store_exists=True, attempt=1)),
        (SLURM | TORCHRUN, Launch("torchrun", 2, 4, 0, 2, *HERE)),  # as examples/launch/job.sbatch does
        (OPEN_MPI, Launch("Open MPI", 3, 8, 1, 2, *HERE)),
        (HYDRA, Launch("MPICH", 3, 4, 1, 2, *HERE)),
        (PALS, Launch("PMI", 3, 8, 1, 2, *HERE)),
        (SLURM, Launch("Slurm", 5, 8, 1, 4, *HERE)),
        (SLURM | ANOTHER_STEP, Launch("Slurm", 5, 6, 1, 3, *HERE)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, Launch("Slurm", 5, 8, 1, 4, *HERE)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3"}, Launch("Slurm", 5, 8, 1, 4, *HERE)),
        (SLURM | PMI2, Launch("Slurm", 5, 8, 1, 4, *HERE)),
    ],
)
def test_each_launcher_is_recognised_and_says_everything(env, launch):
    assert launched(env | AT) == launch


@pytest.mark.parametrize(("mpirun", "name"), [(OPEN_MPI, "Open MPI"), (HYDRA, "MPICH")])
@pytest.mark.parametrize("slurm", [BATCH, SLURM], ids=["that forks", "that starts its helpers with srun"])
def test_mpirun_inside_a_slurm_job_is_mpirun_and_its_first_node_holds_the_store(mpirun, name, slurm):
    launch = launched(slurm | {"SLURM_JOB_NODELIST": "gpu[4-5]"} | mpirun)
    assert (launch.launcher, launch.rank, launch.local_rank, launch.address) == (name, 3, 1, "gpu4")


@for_each(
    "env",
    [
        BATCH,
        BATCH | STEP | {"SLURM_STEP_ID": "4294967291"},
        BATCH | STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        BATCH | STEP | {"SLURM_STEP_ID": "extern"},
        BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1"} | PMI2 | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"},
    ],
)
def test_a_script_or_a_shell_in_a_slurm_job_is_no_launch(env):
    assert launched(env | {"SLURM_JOB_NODELIST": "gpu[4-5]"}) is None


def test_all_ranks_of_a_job_derive_the_same_port_and_other_jobs_another_unless_one_is_given():
    nodes = {"SLURM_JOB_NODELIST": "a"}
    ports = [launched(SLURM | nodes | {"SLURM_PROCID": str(rank)}).port for rank in range(8)]
    assert len(set(ports)) == 1
    assert launched(SLURM | nodes | {"SLURM_JOB_ID": "78"}).port != ports[0]
    assert launched(SLURM | nodes | {"SLURM_STEP_ID": "1"}).port != ports[0]
    assert launched(SLURM | AT).job == ""
    assert launched(SLURM | {"MASTER_ADDR": "10.1.2.3"}).job == "77.0"


def test_ranks_on_one_machine_need_no_address():
    for env in (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}):
        assert launched(env | {"SLURM_JOB_NODELIST": "gpu4"}).address == "127.0.0.1"


@for_each(
    ("env", "says"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not: set both"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not: set both"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 and WORLD_SIZE=4 contradict each other"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK='-1' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR to its host name"),
        (OPEN_MPI, "Open MPI started 8 ranks but nothing says where rank 0 is: set MASTER_ADDR"),
        (BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set but RANK is not"),
        (TORCHRUN | AT | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict each other"),
        (TORCHRUN | AT | {"LOCAL_WORLD_SIZE": "2(x2)"}, r"LOCAL_WORLD_SIZE='2\(x2\)' is no number"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(env, says):
    with pytest.raises(UsageError, match=says):
        launched(env)


def test_ranks_from_the_world_size_on_come_later_and_up_to_a_number():
    env = {"RANK": "5", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert launched(env, up_to=6).rank == 5
    with pytest.raises(UsageError, match=r"RANK=5 and WORLD_SIZE=4 .* ranks are 0\.\.up_to-1, and up_to=5"):
        launched(env, up_to=5)


@for_each(
    ("env", "says"), [({}, "up_to=2 with no launcher"), ({"RANK": "0", "WORLD_SIZE": "3"}, "up_to=2 with 3 ranks")]
)
def test_places_that_cannot_be_are_refused(env, says, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UsageError, match=says):
        commrt.init(up_to=2)


@for_each("text", ["", "soon", "-1", "0", "inf", "nan", "3e6"])
def test_a_deadline_is_a_positive_number_of_seconds(text):
    with pytest.raises(UsageError, match="COMMRT_TIMEOUT_S"):
        environment.default_timeout_s({"COMMRT_TIMEOUT_S": text})
    assert [environment.default_timeout_s(env) for env in ({}, {"COMMRT_TIMEOUT_S": "2.5"})] == [300, 2.5]


@for_each("kind", ["", "mpi", "Shared"])
def test_a_transport_is_one_that_there_is(kind):
    with pytest.raises(UsageError, match=r"COMMRT_TRANSPORT=.* is no transport: set one of shared, gloo"):
        chosen_transport({"COMMRT_TRANSPORT": kind})
    assert [chosen_transport(env) for env in ({"COMMRT_TRANSPORT": "gloo"}, {})] == ["gloo", None]


@for_each(("text", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_a_variable_is_on_unless_it_is_unset_empty_or_0(monkeypatch, text, expected):
    monkeypatch.setenv("COMMRT_NVTX", text)
    assert [environment.is_on(name) for name in ("COMMRT_NVTX", "COMMRT_NO_SUCH")] == [expected, False]


@for_each("seconds", [0, -1.0, float("nan"), float("inf"), 3e6])
def test_a_deadline_that_cannot_be_kept_is_refused(seconds):
    with pytest.raises(UsageError, match=rf"^timeout_s={seconds} is no deadline"):
        commrt.init(timeout_s=seconds)
    with pytest.raises(UsageError, match=rf"^start_timeout_s={seconds} is no deadline"):
        commrt.init(start_timeout_s=seconds)


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2"}, {"RANK": "5"}, {"RANK": "0", "WORLD_SIZE": "many"}])
def test_a_running_group_matters_more_than_what_a_launcher_left_half_set(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with commrt.init() as world:
            assert (world.launcher, world.rank, world.size, world.local_rank) == ("torch.distributed", 0, 1, 0)
    finally:
        dist.destroy_process_group()
