# SPDX-License-Identifier: Apache-2.0
"""If a rank of the torch.distributed backend dies, stops, leaves or differs, all others get an error. None hangs."""

import os
import pickle
import re
import signal
import subprocess
import sys

import c10d_failing_ranks
import pytest
import torch.distributed as dist
from c10d_faults import COLLECTIVES, DISAGREEMENTS, LARGE, SMALL, STRIKES, applies, cells_of, complaints, run
from rank_pool import Pool

from commrt.c10d.dist_errors import as_dist_error
from commrt.errors import DeadlineExceeded, Evicted, Place, UsageError
from commrt.store.launcher import LOOPBACK
from commrt.testing.processes import free_port, run_processes

SOON_S = 20.0
"""What does not wait for the group's timeout of 60 s or more, on a busy machine."""
SIZES = dict(zip(STRIKES, [SMALL, LARGE, LARGE, SMALL], strict=True))
"""Of the messages when a rank is struck; the slow tests have the others."""
OTHER = {SMALL: LARGE, LARGE: SMALL}
SLOW = [
    *(([fault], OTHER[SIZES[fault]], "shared") for fault in STRIKES),
    *(([fault], SMALL, "gloo") for fault in STRIKES),
    (["other shape", "wrong order"], SMALL, "gloo"),
    ([*DISAGREEMENTS], SMALL, "shared"),
    ([*DISAGREEMENTS], LARGE, "shared"),
]
MATRIX = [
    *(([fault], SIZES[fault], "shared") for fault in STRIKES),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
]

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Torch's C++ code logs each request to a store that has ended."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


@pytest.fixture(scope="module")
def pool():
    with Pool(3) as pool:
        yield pool


@pytest.mark.parametrize(
    ("faults", "numel", "transport"), MATRIX, ids=lambda each: each[0] if isinstance(each, list) else None
)
def test_all_ranks_learn_of_a_fault_in_every_collective(faults, numel, transport, monkeypatch):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    cells = cells_of(run(faults, numel=numel))
    assert set(cells) == {(name, fault) for fault in faults for name in COLLECTIVES if applies(fault, name)}
    assert complaints(cells) == []


def found_by(pool, size, body, *args):
    """Return what the ranks return, None for one that is killed. Ranks that say that they wait get a Ctrl-C."""

    def on_message(rank, message, process):
        os.kill(process.pid, signal.SIGINT)

    outcomes = pool.run(body, *args, size=size, on_message=on_message)
    assert [outcome.error for outcome in outcomes] == [None] * size
    assert {outcome.exit_code for outcome in outcomes} <= {0, -signal.SIGKILL}
    return [outcome.value for outcome in outcomes]


def assert_error(found, kind, *said, within_s=SOON_S):
    kinds, text, seconds = found
    assert kind in kinds, text
    assert {"CommrtError", "DistBackendError"} <= set(kinds)
    for each in said:
        assert each in text
    assert seconds < within_s


def test_backward_of_ddp_raises_our_error_when_a_rank_dies(pool):
    for rank, found in enumerate(found_by(pool, 3, c10d_failing_ranks.losing_one_in_backward)):
        if rank != c10d_failing_ranks.LATE:
            assert_error(found, "PeerLost", "all_reduce (sum) of float32", f"[rank {rank}, peer 1, step 8, ")


def test_the_death_of_rank_0_is_an_error_even_if_the_store_dies_with_it():
    for outcome in run_processes(3, c10d_failing_ranks.losing_the_store, limit_s=60.0)[1:]:
        assert outcome.error is None
        assert_error(outcome.value, "PeerLost", "barrier, sequence number 1 of group 0", "peer 0")


def test_a_ctrl_c_ends_a_call_that_waits_and_leaves_a_work_under_way(pool):
    (first, second, again), (others_first, others_second) = found_by(pool, 2, c10d_failing_ranks.interrupted)
    assert first[0][0] == second[0][0] == "KeyboardInterrupt"
    assert again[1] == others_second[1] == "no error"
    assert_error(others_first, "PeerLost", "Rank 0 saw KeyboardInterrupt")


def test_abort_from_another_thread_ends_a_collective_on_all_ranks(pool):
    own, others = found_by(pool, 2, c10d_failing_ranks.aborted)
    assert_error(own, "TransportClosed", "barrier, sequence number 1")
    assert_error(others, "PeerLost", "Rank 0 saw TransportClosed: the process group was aborted")


def test_destroying_a_group_finishes_what_is_under_way_and_waits_for_a_rank_until_the_timeout_only(pool):
    (ended, work), others = found_by(pool, 2, c10d_failing_ranks.destroyed, True)
    assert ended[1] == work[1] == others[1] == "no error"
    (ended, work), others = found_by(pool, 2, c10d_failing_ranks.destroyed, False)
    assert ended[1] == "no error"
    assert ended[2] < SOON_S
    assert_error(work, "DeadlineExceeded", "no answer from ranks [1] within 2 s")
    assert_error(others, "PeerLost", "Rank 0 saw DeadlineExceeded")


def test_a_wait_with_a_timeout_of_its_own_leaves_the_collective_under_way(pool):
    (found, before, after, total), _ = found_by(pool, 2, c10d_failing_ranks.waiting_briefly)
    assert_error(
        found, "DeadlineExceeded", "all_reduce (sum) of float32[8] is still in flight after 0.1 s: wait() again"
    )
    is_in_c = hasattr(dist, "_reconfigure")  # from 2.14 on torch never asks a work in Python whether it is completed
    assert (before, after, total) == (False, [not is_in_c, True], [2.0] * 8)


@pytest.mark.parametrize("sender", [0, 1])  # the one that connects, and the one that is connected to
def test_a_first_send_to_a_rank_that_does_nothing_ends_at_the_timeout(pool, sender):
    found = found_by(pool, 2, c10d_failing_ranks.sending_first, sender)[sender]
    assert_error(found, "DeadlineExceeded", "bucket send with tag 0", within_s=16.0)


def test_a_shorter_timeout_of_a_group_reaches_its_collectives_and_its_receives(pool):
    (from_any, received, barrier), _ = found_by(pool, 2, c10d_failing_ranks.hurried)
    if not hasattr(dist, "_reconfigure"):  # from 2.14 on a receive from any rank is refused
        assert_error(from_any, "DeadlineExceeded", "timed out: the peer did not do its part within 0.5 s")
    assert_error(received, "DeadlineExceeded", "timed out", "bucket receive with tag 0")
    assert_error(barrier, "DeadlineExceeded", "timed out: no answer from ranks [1] within 0.5 s")


@pytest.mark.slow
def test_programs_that_leave_groups_open_end_at_once_with_their_own_codes():
    port = free_port()
    zero, one = (start(rank, port) for rank in (0, c10d_failing_ranks.LATE))
    try:
        assert one.stdout.readline() == "waits\n"
        one.send_signal(signal.SIGINT)
        assert one.wait(SOON_S) == -signal.SIGINT
        said, _ = zero.communicate("go on\n", SOON_S)
    finally:
        zero.kill()
        one.communicate()
    assert zero.returncode == 3
    first, second = said.splitlines()
    assert re.search(r"'PeerLost'.*peer 1.*Rank 1 saw KeyboardInterrupt", first)
    assert re.search(r"'PeerLost'.*peer 1.*the process ended without destroying its process group", second)


def start(rank, port):
    launcher = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in launcher.items()}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", "import c10d_failing_ranks; c10d_failing_ranks.left_open()"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def test_an_error_is_one_of_torchs_and_survives_a_pickle():
    for error in (DeadlineExceeded("late", Place(1, 2)), UsageError("wrong"), Evicted("late", Place(1), 2, by=0)):
        raised = as_dist_error(error)
        again = pickle.loads(pickle.dumps(raised))  # noqa: S301  # our own
        assert type(again) is type(raised)
        assert isinstance(again, type(error))
        assert isinstance(again, dist.DistBackendError)
        assert (str(again), vars(again)) == (str(error), vars(error))
        assert as_dist_error(again) is again
