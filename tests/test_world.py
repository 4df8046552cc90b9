# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves its world by an error leaves at once, and the others learn why."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic

import pytest
import rendezvous_ranks
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

import commrt
from commrt.algorithms import ring, tree
from commrt.errors import CommrtError, DeadlineExceeded, DisagreementError, PeerLost, TransportClosed, UsageError
from commrt.runtime import world as world_module
from commrt.runtime.membership import ConsistencyCheck, Hooks
from commrt.runtime.prepared import COMPARISONS_KEPT, SCHEDULES_KEPT, traits_of
from commrt.runtime.world import World
from commrt.schedule import MIX, Schedule, Step
from commrt.store.launcher import LOOPBACK, TRANSPORTS
from commrt.testing.processes import free_port, run_processes
from commrt.testing.ranks import local_worlds, run_ranks
from commrt.transport.gloo import GlooTransport
from commrt.transport.local import Fabric
from commrt.transport.shared import SharedTransport

PATIENT_S = 30.0
LIMIT_S = 80.0
RING = ring.all_reduce(2)


def test_an_error_of_one_rank_ends_the_wait_of_the_others_and_is_reported():
    first, second = local_worlds(2, timeout_s=PATIENT_S)

    def fail():
        with first:
            raise OSError("the data set is gone")

    begin = monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.run, ring.all_reduce(2), torch.ones(2))
        with pytest.raises(OSError, match="the data set is gone"):
            fail()
        error = waiting.exception()
    assert isinstance(error, PeerLost)
    assert "Rank 0 saw OSError: the data set is gone" in str(error)
    assert monotonic() - begin < PATIENT_S / 2


def test_leaving_by_an_error_does_not_wait_for_a_transfer_that_cannot_end():
    world, _ = local_worlds(2, timeout_s=PATIENT_S)
    begin = monotonic()
    running = hanging(world)
    with pytest.raises(KeyboardInterrupt), world:
        raise KeyboardInterrupt
    assert isinstance(running.exception(), TransportClosed)
    assert world.closed
    assert monotonic() - begin < PATIENT_S / 2


def hanging(world):
    """A transfer of `world` that cannot end."""
    return world.comm_thread.submit(lambda: world.run_now(ring.all_reduce(2), torch.ones(2), rendezvous_ranks.NOW))


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["leave_report", "wait_for_readers"])
def test_a_second_ctrl_c_while_the_others_are_told_ends_the_transfer_too(monkeypatch, step):
    fabric, store = Fabric(2, PATIENT_S), HashStore()
    world = World(fabric.transport(0), store, holds_store=True)
    running = hanging(world)
    begin = monotonic()
    monkeypatch.setattr(world_module, step, interrupt)
    with pytest.raises(KeyboardInterrupt), world:
        raise OSError("the first of two")
    assert isinstance(running.exception(), TransportClosed)
    with pytest.raises(TransportClosed, match="was closed"):
        world.comm_thread.require_open()
    assert monotonic() - begin < PATIENT_S / 2


def test_ctrl_c_while_a_world_finishes_its_work_ends_that_and_it_can_be_closed_again(monkeypatch):
    world, _ = local_worlds(2, timeout_s=PATIENT_S)
    running = hanging(world)
    begin = monotonic()
    monkeypatch.setattr(world.comm_thread, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.close()
    monkeypatch.undo()
    world.close()
    assert running.done()
    assert isinstance(running.exception(), TransportClosed)
    assert monotonic() - begin < PATIENT_S / 2


def test_a_world_that_finishes_its_work_can_still_be_given_up(monkeypatch):
    world, _ = local_worlds(2, timeout_s=PATIENT_S)
    running = hanging(world)
    begin, closes, finish = monotonic(), Event(), world.comm_thread.close
    monkeypatch.setattr(world.comm_thread, "close", lambda: (closes.set(), finish()))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(world.close)
        closes.wait()
        world.abort(OSError("enough"))
        closing.result()
    assert isinstance(running.exception(), TransportClosed)
    assert monotonic() - begin < PATIENT_S / 2


def test_a_world_that_closes_finishes_what_was_submitted():
    worlds = local_worlds(2, timeout_s=PATIENT_S)
    buffers = [torch.ones(2) for _ in worlds]
    go_on = Event()
    for world, buffer in zip(worlds, buffers, strict=True):
        world.comm_thread.submit(go_on.wait)
        for _ in range(3):
            world.comm_thread.submit(lambda w=world, b=buffer: w.run_now(ring.all_reduce(2), b, rendezvous_ranks.NOW))
    with ThreadPoolExecutor(2) as pool:
        closing = [pool.submit(world.close) for world in worlds]
        go_on.set()
    assert [future.exception() for future in closing] == [None, None]
    assert [buffer.tolist() for buffer in buffers] == [[8.0, 8.0]] * 2


@pytest.mark.parametrize(
    ("gpus", "local_rank", "device"),
    [(0, 5, "cpu"), (1, 0, "cuda:0"), (1, 3, "cuda:0"), (4, 0, "cuda:0"), (4, 3, "cuda:3")],
)
def test_a_rank_has_the_gpu_of_its_number_or_the_one_that_it_sees(monkeypatch, gpus, local_rank, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with local_worlds(1)[0] as world:
        world.local_rank = local_rank
        assert world.device == torch.device(device)


def test_more_ranks_than_gpus_are_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with local_worlds(1)[0] as world:
        world.local_rank = 2
        with pytest.raises(UsageError, match="local rank 2 has no GPU of its own, as this process sees 2"):
            _ = world.device


def test_an_aborted_world_refuses_collectives():
    world, _ = local_worlds(2)
    world.abort(UsageError("no"))
    world.abort(UsageError("no"))
    with pytest.raises(TransportClosed):
        world.run(ring.all_reduce(2), torch.ones(2))


def break_by_a_transfer(world):
    def fail():
        raise OSError("no")

    world.comm_thread.submit(fail).exception()


@pytest.mark.parametrize("broken", [break_by_a_transfer, lambda world: world.abort(OSError("no"))])
def test_a_broken_world_waits_for_no_agreement(broken):
    world, _ = local_worlds(2, timeout_s=PATIENT_S)
    broken(world)
    begin = monotonic()
    with pytest.raises(TransportClosed, match=r"this world was given up.* It was OSError: no"):
        world.all_equal("weights", "mark")
    assert monotonic() - begin < PATIENT_S / 2


def with_one_interrupted(body, victim, absent=2):
    """How three ranks end if `victim` gets a Ctrl-C."""

    def strike(rank, message, process):
        if message == "interrupt me":
            os.kill(process.pid, signal.SIGINT)
        return message == "absent"

    outcomes = run_processes(3, body, victim, absent, limit_s=LIMIT_S, on_message=strike)
    assert outcomes[victim].exit_code == 1  # Python's for an interrupt; None if it had to be killed
    return outcomes[1 - victim].error


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_ends_a_worker_in_the_middle_of_a_transfer_and_the_others_with_it(victim):
    error = with_one_interrupted(rendezvous_ranks.interrupted_in_a_transfer, victim)
    assert error is not None
    assert error.startswith("PeerLost")
    assert f"peer {victim}, step" in error


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_ends_a_worker_in_the_middle_of_an_agreement_and_the_others_with_it(victim):
    error = with_one_interrupted(rendezvous_ranks.interrupted_in_an_agreement, victim)
    assert error is not None
    assert error.startswith("PeerLost")
    assert "Rank 1 saw KeyboardInterrupt" in error or victim == 0  # its store goes with it


def test_a_rank_that_leaves_between_two_questions_ends_the_next_one_for_the_others():
    first, second = local_worlds(2, timeout_s=PATIENT_S)
    with pytest.raises(ZeroDivisionError), second:
        raise ZeroDivisionError
    with pytest.raises(PeerLost, match=r"Rank 1 saw ZeroDivisionError"):
        first.agree("lunch")


def test_agree_raises_if_ranks_compare_different_topics():
    def body(world):
        with pytest.raises(DisagreementError, match=r"about topic: '(lunch|dinner)' against '(lunch|dinner)'"):
            world.agree(("lunch", "dinner")[world.rank])

    run_ranks(2, body)


def test_a_closed_world_lets_go_of_a_store_that_is_not_its_own():
    port = free_port()
    world = World(Fabric(1).transport(0), PrefixStore("ours", TCPStore(LOOPBACK, port, is_master=True)))
    world.agree("lunch")
    world.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), timeout=5)


INHERITED = "TransportClosed: this world belongs to the process that opened it"
REFUSALS = {
    "run": INHERITED,
    "agree": INHERITED,
    "submit": INHERITED,
    "pending": INHERITED,
    "current": "UsageError: there is no world yet",
    "init": "UsageError: this process was forked from a rank of the same job",
    "close": "done",
    "abort": "done",
    "transport": "done",
    "exit": "done",
}


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_forked_child_is_refused_and_harms_nobody(monkeypatch, transport):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    outcomes = run_processes(2, rendezvous_ranks.child_uses_the_world, limit_s=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for answers, buffer, reported in [outcome.value for outcome in outcomes]:
        assert {use: answer[: len(REFUSALS[use])] for use, answer in answers.items()} == REFUSALS
        assert buffer == [4.0] * 4
        assert not reported


@pytest.mark.processes
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_forked_child_may_open_a_world_of_its_own(elsewhere):
    port = free_port() if elsewhere else None
    outcomes = run_processes(2, rendezvous_ranks.child_opens_a_world_of_its_own, port, limit_s=LIMIT_S)
    expected = [2, [2.0] * 4] if elsewhere else [1, [1.0] * 4]
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, expected)] * 2


@pytest.mark.processes
def test_a_forked_child_is_no_rank_of_its_parents_group():
    outcomes = run_processes(2, rendezvous_ranks.child_of_a_running_group, limit_s=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert all(outcome.value.startswith(REFUSALS["init"]) for outcome in outcomes)


@pytest.mark.processes
def test_a_forked_child_that_frees_gloo_s_sockets_ends_and_leaves_them_to_its_parent():
    (outcome,) = run_processes(1, rendezvous_ranks.child_frees_a_gloo_transport, limit_s=LIMIT_S)
    assert (outcome.error, outcome.value) == (None, (True, [2.0] * 4))


def inference_ones():
    with torch.inference_mode():
        return torch.ones(4)


UNFIT = {
    "two dimensions": (lambda: torch.ones(2, 2), "flatten it first"),
    "gaps": (lambda: torch.ones(8)[::2], "flatten it first"),
    "a list": (lambda: [1.0] * 4, r"a buffer must be a tensor, not a list"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "flatten it first"),
    "inference": (inference_ones, r"clone\(\) it outside of that"),
    "no addition": (lambda: torch.ones(4).to(torch.float8_e5m2), "cannot run on torch.float8_e5m2"),
}


def run_everywhere(worlds, schedule, buffers):
    """What each rank's run raised."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        runs = [pool.submit(world.run, schedule, buffer) for world, buffer in zip(worlds, buffers, strict=True)]
    return [run.exception() for run in runs]


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_buffer_that_cannot_work_is_refused_and_the_world_goes_on(unfit):
    make, words = UNFIT[unfit]
    worlds = local_worlds(2)
    for world in worlds:
        with pytest.raises(UsageError, match=words):
            world.run(ring.all_reduce(2), make())
    buffers = [torch.ones(4) for _ in worlds]
    assert run_everywhere(worlds, ring.all_reduce(2), buffers) == [None, None]
    assert buffers[0].tolist() == [2.0] * 4


def test_an_error_of_this_rank_alone_while_calls_are_compared_ends_the_world(monkeypatch):
    def interrupted(*_):
        raise UsageError("from a signal handler")

    def run(world):
        if world.rank == 0:
            monkeypatch.setattr(world.consistency, "_gather", interrupted)
        with pytest.raises(CommrtError):
            world.run(commrt.Ring().schedule(0, 2), torch.zeros(4))
        return world.closed

    assert run_ranks(2, run) == [True, True]


@pytest.mark.parametrize("make", [SharedTransport, lambda *args: GlooTransport(*args, LOOPBACK)])
def test_a_buffer_on_a_device_out_of_reach_is_refused_and_the_world_goes_on(make):
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        transports = list(pool.map(lambda rank: make(store, rank, range(2), PATIENT_S), range(2)))
    worlds = [World(transport, store) for transport in transports]
    for world in worlds:
        with pytest.raises(UsageError, match="moves CPU tensors, not those on meta"):
            world.run(ring.all_reduce(2), torch.ones(4, device="meta"))
    assert run_everywhere(worlds, ring.all_reduce(2), [torch.ones(4) for _ in worlds]) == [None, None]
    for world in worlds:
        world.close()


def test_a_dtype_that_torch_cannot_add_can_be_copied_and_not_mixed():
    mix = Schedule("mix", 2, 1, lambda: iter([Step.of([0, 1], [1, 0], 0, 1, MIX)]))

    def body(world):
        buffer = torch.full((4,), float(world.rank)).to(torch.float8_e5m2)
        with pytest.raises(UsageError, match="cannot run on"):
            world.run(mix, buffer)
        world.run(tree.broadcast(2, root=1), buffer)
        return buffer.float().tolist()

    assert run_ranks(2, body) == [[1.0] * 4] * 2


CALLS = {
    "dtype": ((0, 8, torch.float32), (0, 8, torch.int32), "rank 2 .* rank 0 about dtype: torch.int32 .* torch.float32"),
    "numel": ((0, 8, torch.float32), (0, 6, torch.float32), "rank 2 disagrees with rank 0 about numel: 6 against 8"),
    "schedule": ((0, 8, torch.float32), (1, 8, torch.float32), "rank 2 disagrees with rank 0 about schedule: "),
}


@pytest.mark.parametrize("what", CALLS)
def test_ranks_that_run_different_things_are_told_so_and_go_on(what):
    ours, theirs, words = CALLS[what]

    def body(world):
        root, numel, dtype = theirs if world.rank == 2 else ours
        buffer = torch.full((numel,), world.rank, dtype=dtype)
        with pytest.raises(DisagreementError, match=words):
            world.run(tree.broadcast(3, root), buffer)
        assert buffer.unique().tolist() == [world.rank]
        world.run(tree.broadcast(3, root=1), buffer := torch.full((8,), float(world.rank)))
        return buffer.tolist()

    assert run_ranks(3, body) == [[1.0] * 8] * 3


@pytest.fixture
def comparisons(monkeypatch):
    """Every comparison of any rank, as it is made."""
    made, gather = [], ConsistencyCheck._gather

    def counted(comparison, claim, *where):
        made.append(claim)
        return gather(comparison, claim, *where)

    monkeypatch.setattr(ConsistencyCheck, "_gather", counted)
    return made


def test_the_same_movement_of_the_same_buffer_is_compared_once(comparisons):
    def body(world):
        for numel in (8, 8, 9, 8):
            world.run(tree.broadcast(2), torch.ones(numel))

    run_ranks(2, body)
    assert len(comparisons) == 2 * 2


def test_what_was_compared_is_forgotten_after_a_while(comparisons):
    def body(world):
        schedule = ring.all_reduce(2)
        for numel in [*range(COMPARISONS_KEPT + 5), 0]:
            world.run(schedule, torch.ones(numel))
        return [len(known) for known in world._runs._prepared._compared.values()]

    assert run_ranks(2, body) == [[6], [6]]
    assert len(comparisons) == 2 * (COMPARISONS_KEPT + 6)


def test_a_schedule_is_not_taken_for_an_earlier_one_that_is_gone():
    for number in range(3 * SCHEDULES_KEPT):
        schedule = tree.broadcast(2, root=number % 2).over(range(2))  # a new object
        assert traits_of(schedule).digest == schedule.digest()
        del schedule
    assert traits_of.cache_info().currsize == SCHEDULES_KEPT


def test_ranks_that_a_schedule_leaves_out_need_not_come_to_compare():
    def body(world):
        pair, buffer = tree.broadcast(2).over([2, 0], world=3), torch.full((4,), float(world.rank))
        for _ in range(COMPARISONS_KEPT if world.rank != 1 else 0):
            world.run(pair, buffer)
        world.run(tree.broadcast(3, root=2), buffer)
        return buffer.tolist()

    assert run_ranks(3, body) == [[2.0] * 4] * 3


def test_an_agreement_too_many_is_not_taken_for_the_next_one():
    first, second = local_worlds(2, timeout_s=PATIENT_S)
    first.transport.timeout_s = 0.2
    with pytest.raises(DeadlineExceeded, match=r"with ranks \[1\] within 0.2 s"):
        first.all_equal("weights", "mark")
    first.transport.timeout_s = PATIENT_S
    for collective in (lambda: first.all_equal("weights", "mark"), lambda: first.run(RING, torch.ones(2))):
        with pytest.raises(TransportClosed, match=r"It was DeadlineExceeded: no transfer with ranks \[1\]"):
            collective()
    with pytest.raises(PeerLost, match="Rank 0 saw DeadlineExceeded: no transfer with ranks"):
        second.run(RING, torch.ones(2))


def test_an_agreement_that_ends_in_a_disagreement_leaves_the_world_as_it_was():
    def body(world):
        equal = world.all_equal("weights", f"mark of rank {world.rank}")
        world.run(RING, buffer := torch.ones(2))
        return equal, world.all_equal("weights", "mark"), buffer.tolist()

    assert run_ranks(2, body) == [(False, True, [2.0, 2.0])] * 2


def helper(fails=False):
    with commrt.init() as world:
        if fails:
            raise OSError("of the helper")
        return world


def test_an_interrupt_at_the_start_of_a_collective_is_told_to_the_attached_model():
    heard = []

    def interrupted():
        heard.append("begin")
        raise KeyboardInterrupt

    (world,) = local_worlds(1)
    world.hooks = Hooks(before_collective=interrupted, on_collective_error=heard.append)
    with pytest.raises(KeyboardInterrupt) as raised, world.collective("a()"):
        heard.append("body")
    assert heard == ["begin", raised.value]


def test_the_outermost_with_statement_closes_a_world():
    with commrt.init() as world:
        assert helper() is world
        with pytest.raises(OSError, match="of the helper"):
            helper(fails=True)
        assert not world.closed
        world.run(ring.all_reduce(1), torch.ones(1))
    assert world.closed
    with commrt.init() as another:
        assert another is not world
    assert another.closed


def test_a_second_init_applies_its_deadline():
    with commrt.init(100) as world:
        assert commrt.init(3) is world
        assert world.timeout_s == 3
        assert commrt.init().timeout_s == 3
        for wrong in ({"timeout_s": 0}, {"timeout_s": float("nan")}, {"start_timeout_s": -1}):
            with pytest.raises(UsageError, match="is no deadline"):
                commrt.init(**wrong)
        assert world.timeout_s == 3
