# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves its world by an error leaves at once, and the others learn why."""

import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event, main_thread

import pytest
import rendezvous_ranks
import torch
import transports
from cases import on_ranks, taking_turns
from moved_clock import moved_clock
from torch.distributed import PrefixStore, TCPStore

import commrt
from commrt.algorithms import ring, tree
from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, TransportClosed, UsageError
from commrt.runtime.model_hooks import Hooks
from commrt.runtime.prepared import COMPARISONS_KEPT
from commrt.runtime.schedule_traits import SCHEDULES_KEPT, traits_of
from commrt.runtime.world import World
from commrt.schedule import MIX, Schedule, Step
from commrt.store.launcher import LOOPBACK
from commrt.testing.processes import free_port, run_processes
from commrt.testing.ranks import local_worlds, run_ranks
from commrt.transport.local import Fabric
from commrt.transport.names import TRANSPORTS

LIMIT_S = 80.0
RING = ring.all_reduce(2)


def test_an_error_of_one_rank_ends_the_wait_of_the_others_and_is_reported():
    first, second = local_worlds(2)

    def fail():
        with first:
            raise OSError("the data set is gone")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.run, RING, torch.ones(2))
        with pytest.raises(OSError, match="the data set is gone"):
            fail()
        with pytest.raises(PeerLost, match="Rank 0 saw OSError: the data set is gone"):
            waiting.result()


def test_ctrl_c_amid_a_question_ends_the_world_and_the_others_learn_it(monkeypatch):
    first, second = local_worlds(2)
    bind, once = first.transport.bind, iter([signal.SIGINT])

    def interrupt_the_caller(group):
        for number in once:
            signal.pthread_kill(main_thread().ident, number)
        return bind(group)

    monkeypatch.setattr(first.transport, "bind", interrupt_the_caller)
    with pytest.raises(KeyboardInterrupt):
        first.agree("lunch")
    assert first.closed
    with pytest.raises(PeerLost, match="Rank 0 saw KeyboardInterrupt"):
        second.agree("lunch")


@pytest.fixture
def hanging_world():
    """A world with a transfer that nothing ends but the world."""
    world, _other = local_worlds(2)
    running = world.comm_thread.submit(lambda: world.run_now(RING, torch.ones(2), rendezvous_ranks.NOW))
    yield world
    assert isinstance(running.exception(), TransportClosed)


def interrupt(*_):
    raise KeyboardInterrupt


def test_leaving_by_an_error_does_not_wait_for_a_transfer_that_cannot_end(hanging_world):
    with pytest.raises(KeyboardInterrupt), hanging_world:
        raise KeyboardInterrupt
    assert hanging_world.closed


def test_ctrl_c_while_a_world_finishes_its_work_ends_that_and_it_can_be_closed_again(monkeypatch, hanging_world):
    monkeypatch.setattr(hanging_world.comm_thread, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hanging_world.close()
    monkeypatch.undo()
    hanging_world.close()


def test_a_world_that_finishes_its_work_can_still_be_given_up(monkeypatch, hanging_world):
    closes, finish = Event(), hanging_world.comm_thread.close
    monkeypatch.setattr(hanging_world.comm_thread, "close", lambda: (closes.set(), finish()))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(hanging_world.close)
        closes.wait()
        hanging_world.abort(OSError("enough"))
        closing.result()


@pytest.mark.parametrize(
    ("gpus", "local_rank", "device"),
    [(0, 5, "cpu"), (1, 0, "cuda:0"), (1, 3, "cuda:0"), (4, 0, "cuda:0"), (4, 3, "cuda:3"), (2, 2, None)],
)
def test_a_rank_has_the_gpu_of_its_number_or_the_one_that_it_sees(monkeypatch, gpus, local_rank, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    refused = pytest.raises(UsageError, match="local rank 2 has no GPU of its own, as this process sees 2")
    with local_worlds(1)[0] as world, nullcontext() if device else refused:
        world.local_rank = local_rank
        assert world.device == torch.device(str(device))


def fail_in_a_transfer(world):
    def fail():
        raise OSError("no")

    world.comm_thread.submit(fail).exception()


def abort_twice(world):
    for _ in range(2):
        world.abort(OSError("no"))


@pytest.mark.parametrize("end", [fail_in_a_transfer, abort_twice])
def test_a_world_that_has_ended_refuses_collectives_at_once_and_says_why(end):
    world, _other = local_worlds(2)
    end(world)
    for collective in (lambda: world.all_equal("weights", "mark"), lambda: world.run(RING, torch.ones(2))):
        with pytest.raises(TransportClosed, match=r"this world was given up.* It was OSError: no"):
            collective()


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_ends_a_worker_in_the_middle_of_a_transfer_and_the_others_with_it(victim):
    def strike(rank, message, process):
        if message == "interrupt me":
            os.kill(process.pid, signal.SIGINT)
        return message == "absent"

    body = rendezvous_ranks.interrupted_in_a_transfer
    outcomes = run_processes(3, body, victim, 2, limit_s=LIMIT_S, on_message=strike)
    assert outcomes[victim].exit_code == 1  # Python's for an interrupt; None if it had to be killed
    assert re.match(f"PeerLost.*peer {victim}, step", outcomes[1 - victim].error)


def test_a_closed_world_lets_go_of_a_store_that_is_not_its_own():
    port = free_port()
    world = World(Fabric(1).transport(0), PrefixStore("ours", TCPStore(LOOPBACK, port, is_master=True)))
    world.agree("lunch")
    world.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), timeout=5)


INHERITED = "TransportClosed: this world belongs to the process that opened it"
REFUSALS = {
    **dict.fromkeys(["run", "agree", "submit", "pending"], INHERITED),
    "current": "UsageError: there is no world yet",
    "init": "UsageError: this process was forked from a rank of the same job",
    **dict.fromkeys(["close", "abort", "transport", "exit", "a world of its own", "a world elsewhere"], "no error"),
}


@pytest.mark.processes
@pytest.mark.parametrize(("transport", "in_group"), taking_turns(TRANSPORTS, [False, True]))
def test_a_forked_child_may_only_open_other_worlds_and_harms_nobody(monkeypatch, transport, in_group):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    outcomes = run_processes(2, rendezvous_ranks.child_uses_the_world, in_group, free_port(), limit_s=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for answers, buffer, reported in [outcome.value for outcome in outcomes]:
        assert {use: answer[: len(REFUSALS[use])] for use, answer in answers.items()} == REFUSALS
        assert buffer == [4.0] * 4
        assert not reported


UNFIT = {
    "two dimensions": (lambda: torch.ones(2, 2), "flatten it first"),
    "gaps": (lambda: torch.ones(8)[::2], "flatten it first"),
    "a list": (lambda: [1.0] * 4, r"a buffer must be a tensor, not a list: make one with torch\.tensor"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "flatten it first"),
    "inference": (lambda: torch.inference_mode()(torch.ones)(4), r"clone\(\) it outside of that"),
    "no addition": (lambda: torch.ones(4).to(torch.float8_e5m2), "cannot run on torch.float8_e5m2"),
    "out of reach": (lambda: torch.ones(4, device="meta"), "on meta"),
}


@pytest.mark.parametrize("connect", [transports.shared, transports.gloo])
def test_a_buffer_that_cannot_work_is_refused_and_the_world_goes_on(connect):
    def body(world):
        for make, words in UNFIT.values():
            with pytest.raises(UsageError, match=words):
                world.run(RING, make())
        world.run(RING, buffer := torch.ones(4))
        return buffer.tolist()

    assert run_ranks(2, body, connect=lambda _, *given: connect(*given)) == [[2.0] * 4] * 2


@on_ranks(2)
def test_a_dtype_that_torch_cannot_add_can_be_copied_and_not_mixed(world):
    mix = Schedule("mix", 2, 1, lambda: iter([Step.of([0, 1], [1, 0], 0, 1, MIX)]))
    buffer = torch.full((4,), float(world.rank)).to(torch.float8_e5m2)
    with pytest.raises(UsageError, match="cannot run on"):
        world.run(mix, buffer)
    world.run(tree.broadcast(2, root=1), buffer)
    assert buffer.float().tolist() == [1.0] * 4


OURS = (0, 8, torch.float32)
THEIRS = {
    (0, 8, torch.int32): "rank 2 disagrees with rank 0 about dtype: torch.int32 against torch.float32",
    (0, 6, torch.float32): "rank 2 disagrees with rank 0 about numel: 6 against 8",
    (1, 8, torch.float32): "rank 2 disagrees with rank 0 about schedule: ",
}
"""Root, elements and dtype of rank 2's broadcast, and what all ranks are told."""


@on_ranks(3)
def test_ranks_that_run_different_things_are_told_so_and_go_on(world):
    for theirs, words in THEIRS.items():
        root, numel, dtype = theirs if world.rank == 2 else OURS
        buffer = torch.full((numel,), world.rank, dtype=dtype)
        with pytest.raises(DisagreementError, match=words):
            world.run(tree.broadcast(3, root), buffer)
        assert buffer.unique().tolist() == [world.rank]
    with pytest.raises(DisagreementError, match=r"about (topic|schedule)"):  # ranks 0 and 1 differ, too
        world.run(tree.broadcast(3), buffer) if world.rank == 2 else world.agree("lunch", at=str(world.rank))
    world.run(tree.broadcast(3, root=1), buffer := torch.full((8,), float(world.rank)))
    assert buffer.tolist() == [1.0] * 8


def test_a_schedule_is_not_taken_for_an_earlier_one_that_is_gone():
    for number in range(3 * SCHEDULES_KEPT):
        schedule = tree.broadcast(2, root=number % 2).over(range(2))  # a new object
        assert traits_of(schedule).digest == schedule.digest()
        del schedule
    assert traits_of.cache_info().currsize == SCHEDULES_KEPT


@on_ranks(3)
def test_ranks_that_a_schedule_leaves_out_need_not_come_to_compare(world):
    pair, buffer = tree.broadcast(2).over([2, 0], world=3), torch.full((4,), float(world.rank))
    for _ in range(COMPARISONS_KEPT if world.rank != 1 else 0):
        world.run(pair, buffer)
    world.run(tree.broadcast(3, root=2), buffer)
    assert buffer.tolist() == [2.0] * 4


def test_an_agreement_too_many_is_not_taken_for_the_next_one():
    first, second = local_worlds(2)
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        comparison = pool.submit(first.all_equal, "weights", "mark")
        clock.advance_until(comparison.done)
    with pytest.raises(DeadlineExceeded, match=r"with ranks \[1\] within 20 s.*bucket weights"):
        comparison.result()
    for collective in (lambda: first.all_equal("weights", "mark"), lambda: first.run(RING, torch.ones(2))):
        with pytest.raises(TransportClosed, match=r"It was DeadlineExceeded: timed out: no transfer with ranks \[1\]"):
            collective()
    with pytest.raises(
        PeerLost, match=r"rank 1 was in world.run\(\), and rank 0 in agree \(weights\): make both calls"
    ):
        second.run(RING, torch.ones(2))


@on_ranks(2)
def test_an_agreement_that_ends_in_a_disagreement_leaves_the_world_as_it_was(world):
    with pytest.raises(DisagreementError, match=r"about topic: '(weights|buffers)' against '(weights|buffers)'"):
        world.all_equal(("weights", "buffers")[world.rank], "mark")
    equal = world.all_equal("weights", f"mark of rank {world.rank}")
    world.run(RING, buffer := torch.ones(2))
    assert (equal, world.all_equal("weights", "mark"), buffer.tolist()) == (False, True, [2.0, 2.0])


def test_an_interrupt_at_the_start_of_a_collective_is_told_to_the_attached_model():
    heard, (world,) = [], local_worlds(1)
    world.hooks = Hooks(before_collective=interrupt, on_collective_error=heard.append)
    with pytest.raises(KeyboardInterrupt) as raised, world.collective("a()"):
        pass
    assert heard == [raised.value]


def helper(fails=False):
    with commrt.init() as world:
        if fails:
            raise OSError("of the helper")
        return world


def test_the_outermost_with_statement_closes_a_world():
    with commrt.init() as world:
        assert (world.rank, world.size, world.launcher) == (0, 1, "one process")
        assert helper() is commrt.current() is world
        with pytest.raises(OSError, match="of the helper"):
            helper(fails=True)
        assert not world.closed
        world.run(ring.all_reduce(1), torch.ones(1))
    assert world.closed
    with commrt.init() as another:
        assert another is not world
    assert another.closed


def test_a_second_init_applies_its_deadline_unless_that_is_refused():
    with commrt.init(100) as world:
        assert commrt.init(3) is world
        assert commrt.init().timeout_s == world.timeout_s == 3
        with pytest.raises(UsageError, match="timeout_s=0 is no deadline"):
            commrt.init(0)
        with pytest.raises(UsageError, match="start_timeout_s=2 is below timeout_s=3"):
            commrt.init(start_timeout_s=2)
        assert world.timeout_s == 3
        assert commrt.init(20, start_timeout_s=20).timeout_s == 20
