# SPDX-License-Identifier: Apache-2.0
"""Faults that are asked for happen, where and when they were asked for."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, thread_time

import inject_faults
import pytest
from cases import for_each
from forked_commands import command
from inject_faults import Fault, Injection, check, extra_s, parse

from commrt.errors import UsageError

# nothing that is forked here computes
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
WORKERS = 4
STEPS = 62


def slow(prob, **fields):
    return Fault("slow", prob=prob, **fields)


@for_each(
    ("text", "fault"),
    [
        ("slow:rank=2,prob=0.1,seconds=0.5", slow(0.1, seconds=0.5, rank=2)),
        ("slow:prob=1,seconds=0", slow(1.0, seconds=0.0)),
        ("slow:prob=0.03,low=5,high=20", slow(0.03, low=5.0, high=20.0)),
        ("slow:high=2,low=1,prob=0,rank=0", slow(0.0, low=1.0, high=2.0, rank=0)),
        ("kill:rank=3,step=20", Fault("kill", 3, 20)),
        ("stop:step=61,rank=1,seconds=5", Fault("stop", 1, 61, seconds=5.0)),
    ],
)
def test_a_fault_is_what_was_written(text, fault):
    assert parse(text) == fault
    check(fault, WORKERS, STEPS)


@for_each(
    ("text", "says"),
    [
        ("", "no fault is called '': choose one of kill, slow, stop$"),
        ("kill", "missing, unknown or given twice: write kill:rank=3,step=20$"),
        ("kill:step=3", "missing, unknown or given twice"),
        ("kill:rank=1,step=3,seconds=1", "missing, unknown or given twice"),
        ("kill:rank=1,rank=2,step=3", "missing, unknown or given twice"),
        ("stop:rank=1,step=3", "write stop:rank=1,step=30,seconds=5$"),
        ("slow:prob=0.1", "write slow:prob=0.1,seconds=0.5 or slow:prob=0.03,low=5,high=20"),
        ("slow:prob=0.1,seconds=1,low=3,high=4", "missing, unknown or given twice"),
        ("kill:rank=one,step=3", "'one': write kill:rank=3,step=20$"),
        ("kill:rank=1.5,step=3", r"'1\.5': write"),
        ("slow:prob=often,seconds=1", "'often': write"),
    ],
)
def test_what_is_no_fault_is_one_sentence(text, says):
    with pytest.raises(UsageError, match=f"^--inject {text}: .*{says}"):
        parse(text)


@for_each(
    ("text", "says"),
    [
        ("kill:rank=4,step=0", r"rank=4 must be in 0\.\.3"),
        ("kill:rank=0,step=62", r"step=62 must be in 0\.\.61"),
        ("stop:rank=0,step=-1,seconds=1", r"step=-1 must be in 0\.\.61"),
        ("stop:rank=0,step=0,seconds=-1", r"seconds=-1 must be in 0\.\."),
        ("stop:rank=0,step=0,seconds=inf", r"seconds=inf must be in 0\.\."),
        ("slow:prob=1.1,seconds=1", r"prob=1\.1 must be in 0\.\.1"),
        ("slow:prob=nan,seconds=1", r"prob=nan must be in 0\.\.1"),
        ("slow:prob=0.1,low=0.5,high=2", r"low=0\.5 must be in 1\.\."),
        ("slow:prob=0.1,low=5,high=2", r"high=2 must be in 5\.\."),
        ("slow:prob=0.1,low=5,high=1e9", r"high=1e\+09 must be in 5\.\."),
    ],
)
def test_what_cannot_happen_in_a_run_is_one_sentence(text, says):
    with pytest.raises(
        UsageError, match=f"^--inject {text.partition(':')[0]}: {says}.* in this run$"
    ):
        check(parse(text), WORKERS, STEPS)


def times(faults, seed=0, rank=0, usual_s=0.01, steps=2000):
    return [extra_s(faults, seed, rank, step, usual_s) for step in range(steps)]


def test_slowness_is_the_same_in_each_run_and_another_for_each_seed_rank_and_fault():
    fault = slow(0.3, low=5, high=20)
    assert times([fault]) == times([fault])
    for other in (
        times([fault], seed=1),
        times([fault], rank=1),
        times([Fault("kill", 0, 0), fault]),
    ):
        assert other != times([fault])


def test_slowness_comes_as_often_and_lasts_as_long_as_asked():
    struck = [seconds for seconds in times([slow(0.1, seconds=0.5)]) if seconds]
    assert set(struck) == {0.5}
    assert 150 < len(struck) < 250  # of 2000; a standard deviation is 13
    struck = [seconds for seconds in times([slow(0.1, low=5, high=20)]) if seconds]
    assert 150 < len(struck) < 250
    assert min(struck) == pytest.approx(0.04, abs=0.01)
    assert max(struck) == pytest.approx(0.19, abs=0.01)
    assert times(
        [
            slow(1, seconds=0.5),
            slow(1, seconds=0.25, rank=0),
            slow(1, seconds=8, rank=1),
            slow(0, seconds=9),
        ],
        steps=2,
    ) == [0.75, 0.75]


def test_how_long_a_step_usually_takes_is_the_median_of_what_this_rank_has_computed(monkeypatch):
    slept = []
    monkeypatch.setattr(inject_faults, "sleep", slept.append)
    injected = Injection([slow(1, low=3, high=3)], 0, 0)
    for compute_s in (0.02, 0.02, 0.2, 0.02):
        injected.begin_step()
        injected.compute()
        sleep(0.05)  # as one waits for others
        end_s = thread_time() + compute_s
        while thread_time() < end_s:
            pass
    assert slept == pytest.approx([0.04, 0.04, 0.04], abs=0.01)  # nothing is usual at first


def test_a_fault_strikes_only_the_rank_and_the_step_that_it_names(monkeypatch):
    struck = []
    faults = [Fault("kill", 1, 2), Fault("kill", 0, 1), Fault("kill", 1, 0)]
    monkeypatch.setattr(Fault, "strike", lambda fault: struck.append(fault))  # noqa: PLW0108  # a method
    injected = Injection(faults, 0, 1)
    seen = []
    for _ in range(4):
        injected.begin_step()
        seen.append(list(struck))
    assert seen == [faults[2:], faults[2:], [faults[2], faults[0]], [faults[2], faults[0]]]


def forked(body):
    """A process that does `body`; its id."""
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(0)
    return pid


# of Python 3.12: nothing that is forked computes
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_stopped_process_continues_and_a_killed_one_does_not():
    begin_s = monotonic()
    stopped = forked(Fault("stop", 0, 0, seconds=2.0).strike)
    assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
    assert os.waitpid(stopped, 0)[1] == 0
    assert 2.0 <= monotonic() - begin_s < 20
    assert os.WTERMSIG(os.waitpid(forked(Fault("kill", 0, 0).strike), 0)[1]) == signal.SIGKILL


def test_killing_a_stopped_process_ends_its_waiting_child():
    stopped = forked(Fault("stop", 0, 0, seconds=1000.0).strike)
    os.waitpid(stopped, os.WUNTRACED)
    (waiting,) = Path(f"/proc/{stopped}/task/{stopped}/children").read_text().split()
    os.kill(stopped, signal.SIGKILL)
    os.waitpid(stopped, 0)
    end_s = monotonic() + 20
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{waiting}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert monotonic() < end_s
            sleep(0.01)


def trained(*args):
    return command("--epochs", "1", "--batch-size", "400", "--json", *args, program="train")


@pytest.mark.slow
@pytest.mark.processes
def test_gossip_goes_on_without_a_killed_worker_and_says_who_was_lost():
    args = [
        "--workers",
        "3",
        "--algorithm",
        "gossip",
        "--inject",
        "kill:rank=0,step=4",
        "--compare",
        "gossip",
    ]
    result = trained(*args)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    for each in (record, *record["compared"]):
        assert (each["lost"], each["workers"], each["replicas_equal"]) == ([0], 3, True)
    assert len(record["compared"]) == 1
    assert "commrt: rank 0 is lost, as the others noticed in step" in result.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_backup_workers_lose_no_step_to_a_killed_worker_and_a_slow_one():
    faults = ["--inject", "kill:rank=2,step=1", "--inject", "slow:rank=4,prob=1,seconds=0.6"]
    result = trained("--workers", "5", "--algorithm", "backup", "--backups", "2", *faults)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["lost"], record["steps"], record["replicas_equal"]) == ([2], 10, True)
    assert record["late"]["4"] > 0
    assert record["saved_seconds"] > 0


@pytest.mark.processes
def test_an_all_reduce_ends_with_a_killed_worker_long_before_a_deadline():
    args = [
        "--workers",
        "2",
        "--algorithm",
        "torus2d",
        "--inject",
        "kill:rank=1,step=4",
        "--timeout-s",
        "1000",
    ]
    result = trained(*args)
    assert (result.returncode, result.stdout) == (1, "")
    says = "commrt: worker 1 was killed by SIGKILL: this run needs all of its 2 workers; "
    assert result.stderr.splitlines()[-1].startswith(says)
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_an_all_reduce_waits_for_a_stopped_worker_and_for_slow_ones():
    faults = ["--inject", "stop:rank=1,step=4,seconds=1", "--inject", "slow:prob=1,seconds=0.05"]
    result = trained("--workers", "2", "--algorithm", "torus2d", *faults)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["step_seconds"] * record["steps"] > 1 + 0.05 * record["steps"]
    assert (record["lost"], record["replicas_equal"]) == ([], True)
