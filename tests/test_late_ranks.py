# SPDX-License-Identifier: Apache-2.0
"""Who is late in a running job, as its ranks publish it."""

import atexit
from types import SimpleNamespace

from cases import for_each
from small_models import backward, trainee
from torch.distributed import HashStore

from commrt.runtime import publishing
from commrt.runtime.publishing import Publisher, start_publishing
from commrt.store.late import LateWatch
from commrt.store.live import Record, base_of, read
from commrt.testing.ranks import run_ranks
from commrt.tools.measuring.live_job import end_of, looks


def job(second, steps=0, exposed_s=(0.0, 0.0), waiting=None, silent=None, lost=()):
    """Return the records of two ranks: one may wait for a bucket, and of one nothing new may come."""
    at = (1000.0 + second, steps * second, steps * second, 1000.0 + (second if steps else 0))
    numbers = [0 if rank == silent else second for rank in range(2)]
    buckets = [3 if rank == waiting else None for rank in range(2)]
    rest = [(exposed_s[rank] * second, buckets[rank], False, lost) for rank in range(2)]
    return [Record(rank, "h", numbers[rank], *at, *rest[rank]) for rank in range(2)]


@for_each(
    ("what", "options"),
    [
        ("stalled", {"waiting": 0}),
        ("slow", {"steps": 5, "exposed_s": (0.4, 0.01)}),
        ("silent", {"steps": 5, "silent": 1}),
        (None, {"steps": 5, "silent": 1, "lost": (1,)}),
        (None, {"steps": 5, "exposed_s": (0.04, 0.01)}),
    ],
)
def test_a_rank_that_others_wait_for_is_told_once_in_ten_seconds(what, options):
    watch = LateWatch()
    told = [late for second in range(9) for late in watch.news(watch.look(job(second, **options), second), second)]
    assert [(late.what, late.rank) for late in told] == ([] if what is None else [(what, 1)])


def test_ranks_publish_what_a_watcher_shows_and_their_end_as_the_process_ends(monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)

    def body(world):
        model, *_ = trainee(world)
        backward(model, world.rank)
        Publisher(world).publish()
        world.agree("both are there")
        steps = [record.step for record in read(base_of(world.store))]
        state = next(looks(world.store))[0][world.rank].state
        world.agree("both have looked")
        start_publishing(world)
        world.agree("both publish")
        at_exit.pop()()
        world.agree("the processes end")
        return steps, state, end_of(next(looks(world.store)), "node1:29500").split(":")[0]

    assert run_ranks(2, body) == [([1, 1], "computes", "the job has ended")] * 2


def test_a_rank_tries_again_to_publish_until_its_world_ends(monkeypatch):
    def fail(_):
        tries.append(None)
        world.closed = len(tries) == 3
        raise RuntimeError("the store gave no answer")

    tries, world = [], SimpleNamespace(rank=1, members=[0], store=HashStore(), timeout_s=30.0, closed=False)
    monkeypatch.setattr(publishing, "PERIOD_S", 0.0)
    monkeypatch.setattr(Publisher, "publish", fail)
    Publisher(world).work()
    assert len(tries) == 4
