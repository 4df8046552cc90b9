# SPDX-License-Identifier: Apache-2.0
"""Local workers report how they ended, and none is left running afterwards."""

import os
import pickle
import signal
from contextlib import suppress
from multiprocessing import Pipe, get_context
from pathlib import Path
from time import monotonic, sleep

import pytest
from cases import for_each
from peer_group import wait_until

from commrt import errors
from commrt.errors import CommrtError, DisagreementError, PeerLost, UsageError
from commrt.store.launcher import launched
from commrt.store.rendezvous import meet
from commrt.testing import workers
from commrt.testing.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # nothing that is forked here computes
LIMIT_S = 20.0


def rank():
    return launched().rank


def pause():
    sleep(1000)


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def test_each_worker_finds_its_rank_and_a_store_that_outlives_rank_0():
    def body():
        launch = launched()
        store = meet(launch, LIMIT_S)
        if launch.rank == 0:
            store.set("said", "by one who is dead")
            die()
        return launch, store.get("said"), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    values = run_workers(3, body, may_lose=1)
    assert sorted(values) == [1, 2]
    for rank, (launch, said, blocked) in values.items():
        assert (launch.launcher, launch.rank, launch.size) == ("torchrun", rank, 3)
        assert (launch.local_rank, launch.local_size, launch.address) == (rank, 3, "127.0.0.1")
        assert launch.store_exists
        assert said == b"by one who is dead"
        assert blocked == {signal.SIGINT}


def test_a_run_of_workers_leaves_nothing_behind_even_if_it_failed():
    def left():
        held = [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]
        return held, signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    assert run_workers(2, rank) == {0: 0, 1: 1}
    before = left()
    assert run_workers(2, rank) == {0: 0, 1: 1}
    with pytest.raises(CommrtError) as kept:
        run_workers(2, die)
    assert left() == before
    assert kept.traceback


@pytest.mark.parametrize("kind", [UsageError, DisagreementError, PeerLost, KeyError])
def test_an_error_ends_all_others_at_once_and_bad_input_stays_bad_input(kind, monkeypatch):
    monkeypatch.setattr(workers, "CAUSE_S", 0.05)

    def body():
        if rank() == 1:
            raise kind("too much")
        pause()

    begin_s = monotonic()
    with pytest.raises(CommrtError, match=rf"^worker 1 failed: {kind.__name__}: '?too much'?$") as raised:
        run_workers(3, body, may_lose=2)
    assert monotonic() - begin_s < LIMIT_S
    assert type(raised.value) is (kind if kind in (UsageError, DisagreementError) else CommrtError)


def fail_after_a_death():
    if rank() == 1:
        die()
    sleep(0.5)
    raise OSError("the disk is full")


def die_after_an_error():
    if rank() == 1:
        sleep(0.1)
        die(signal.SIGUSR1)
    raise PeerLost("the connection broke")


def die_but_for_the_first():
    if rank():
        die(signal.SIGTERM)
    pause()


ENDS = {
    fail_after_a_death: (1, r"worker [02] failed: OSError: .* full \(before that, worker 1 was killed by SIGKILL\)$"),
    die_after_an_error: (0, "worker 1 was killed by SIGUSR1: this run needs all of its 3 workers"),
    die_but_for_the_first: (1, r"(worker \d was killed by SIGTERM(, |: )){2}this run can do without 1 of its 3"),
    lambda: os._exit(7): (1, r"worker \d failed: silence: it ended with exit code 7 and sent no result$"),
}
"""How many workers a run may lose, and what it says if they end so."""


@pytest.mark.parametrize("body", ENDS)
def test_a_run_that_misses_workers_names_them_and_the_cause(body, monkeypatch):
    monkeypatch.setattr(workers, "CAUSE_S", LIMIT_S)
    may_lose, says = ENDS[body]
    with pytest.raises(CommrtError, match=f"^{says}"):
        run_workers(3, body, may_lose)


def test_too_many_workers_are_a_sentence_and_those_that_were_started_end(monkeypatch):
    def fork(real=os.fork):
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(real())
        return started[0]

    started = []
    monkeypatch.setattr(os, "fork", fork)
    says = r"^worker 1 of 3 could not be started: \[Errno 11\] Resource temporarily unavailable: ask for fewer"
    with pytest.raises(CommrtError, match=says):
        run_workers(3, pause)
    assert not lives(started[0])


def crew_of_another_process(end):
    """Two workers, one of them stopped, and how the process ended that `end` was done to."""

    def body():
        tell.send(os.getpid())
        if rank() == 1:
            die(signal.SIGSTOP)
        pause()

    def parent():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        try:
            run_workers(2, body)
        except KeyboardInterrupt as stopped:
            tell.send([int(number) for number in stopped.args])

    heard, tell = Pipe(duplex=False)
    process = get_context("fork").Process(target=parent)
    process.start()
    tell.close()
    workers = [heard.recv() for _ in range(2)]
    end(process)
    process.join(LIMIT_S)
    assert process.exitcode is not None
    wait_until(lambda: not any(lives(pid) for pid in workers))
    said = []
    with suppress(EOFError):
        while heard.poll():
            said.append(heard.recv())
    return process.exitcode, said


def lives(pid):
    """False for a zombie too, which whoever adopts orphans here may not reap."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_no_worker_outlives_the_process_that_holds_their_store_not_even_a_stopped_one():
    assert crew_of_another_process(lambda process: process.kill()) == (-signal.SIGKILL, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_ends_all_workers_and_is_told(number):
    told = [] if number == signal.SIGINT else [int(number)]
    assert crew_of_another_process(lambda process: os.kill(process.pid, number)) == (0, [told])


def every_error(kind=errors.CommrtError):
    return [kind, *(each for child in kind.__subclasses__() for each in every_error(child))]


@for_each("kind", every_error())
def test_an_error_crosses_processes_as_it_is(kind):
    error = kind(*(("it was late", errors.Place(1), 4, 0) if issubclass(kind, errors.Evicted) else ("it failed",)))
    error.elsewhere = "rank 2 said so"  # written after the failure
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # of this test
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
