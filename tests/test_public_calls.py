# SPDX-License-Identifier: Apache-2.0
"""What a newcomer types: calls of a world beside all_reduce, names of the command line, what repr and dir show."""

import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import for_each, on_ranks
from failing_ranks import raised
from local_loops import Loop
from torch.distributed import ReduceOp

import commrt
from commrt import Gossip, Ring, Torus2D
from commrt.algorithms.arguments import as_algorithm
from commrt.algorithms.catalogue import ALGORITHMS, POLICIES
from commrt.quantizer import DTYPES
from commrt.runtime.wire import as_wire
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks


@for_each("ranks", [1, 2, 5])
def test_ranks_meet_send_a_tensor_to_all_and_gather_objects(ranks):
    def body(world):
        world.barrier()
        sent = [torch.arange(6).view(2, 3).t(), torch.tensor([True, False]), torch.tensor(1 + 1j), torch.empty(0)]
        for wanted in sent:
            got = wanted if world.rank == ranks - 1 else torch.zeros(wanted.shape, dtype=wanted.dtype)
            world.broadcast(got, root=ranks - 1)
            assert torch.equal(got, wanted)
        with torch.inference_mode():
            assert world.all_gather_object("x" * world.rank) == ["x" * rank for rank in range(ranks)]
            assert world.broadcast_object({"of": world.rank}, root=ranks - 1) == {"of": ranks - 1}
        assert "type Linear cannot be sent" in raised(lambda: world.all_gather_object(torch.nn.Linear(1, 1)))

    run_ranks(ranks, body)


@on_ranks(3, timeout_s=30.0)
def test_calls_go_on_among_those_that_are_left(world):
    Loop(world, Gossip()).run(1).replica.drain()
    if world.rank == 1:
        return
    assert world.all_gather_object(world.rank) == [0, 2]  # nobody has noticed the loss
    world.broadcast(tensor := torch.tensor([world.rank]), root=2)
    assert tensor.tolist() == [2]
    assert "give one of the ranks that take part, world.members, [0, 2]" in raised(lambda: world.broadcast(tensor, 1))
    world.barrier()


@on_ranks(2)
def test_names_of_torch_and_of_the_command_line_mean_the_objects(world):
    for op, wanted in (("avg", 1.5), (ReduceOp.AVG, 1.5), ("sum", 3.0), (ReduceOp(ReduceOp.SUM), 3.0)):
        for _ in range(2):
            world.all_reduce(tensor := torch.tensor([1.0 + world.rank]), op, algorithm="torus2d", wire="fp16")
            assert tensor.tolist() == [wanted]
    for op in ("max", ReduceOp.MIN, 3):
        assert 'use "mean", as gradients are' in raised(partial(world.all_reduce, tensor, op))
    for name, kind in ALGORITHMS.items():
        assert as_algorithm(name) == as_algorithm(kind.__name__) == kind()
    assert [type(as_algorithm(name)).__name__ for name in POLICIES] == ["Gossip", "BackupWorkers", "LocalSGD"]
    assert [*map(as_wire, DTYPES)] == [torch.float32, torch.bfloat16, torch.float16]
    assert (as_wire("bfloat16"), as_wire("Int4")) == (torch.bfloat16, commrt.Int4())
    assert "'int3': choose one of fp32, bf16, fp16, int8, int4, int2" in raised(lambda: as_wire("int3"))
    assert commrt.DDPState("Torus2D", "bf16") == commrt.DDPState(Torus2D(), torch.bfloat16)


@for_each("algorithm", [Ring(), Gossip(), commrt.LocalSGD(2)])
@on_ranks(1)
def test_what_is_shown_is_for_users_and_steps_of_one_rank_count(world, algorithm):
    replica = Loop(world, algorithm).run(3).replica
    assert replica.stats().steps == 3
    assert repr(world) == "<World: rank 0 of 1, over local, by threads>"
    assert repr(replica) == f"<Replica of Sequential at step 3: {algorithm!r}, rank 0 of 1 over local>"
    page = (Path(__file__).parents[1] / "docs/api/training.md").read_text()
    assert dir(world) == sorted(re.findall(r"\w+", re.search(r"members:\s*\[([^]]+)\]", page)[1]))
    assert {"buckets", "come", "_step"}.isdisjoint(dir(replica))


def test_one_rank_says_in_one_line_what_it_has_attached(caplog):
    with caplog.at_level(logging.INFO, "commrt"):
        run_ranks(2, lambda world: commrt.attach(torch.nn.Linear(999, 1), None, "ring", wire="bf16", world=world))
    said = r"commrt: attached Linear: 2 ranks, 2 on this host, over local; Ring\(\), its schedule ring; 2 tensors of"
    assert re.fullmatch(rf"{said} 0.004 MB in 1 buckets; wire torch.bfloat16; memory of .*", *caplog.messages)


@on_ranks(1)
def test_a_wrong_name_or_kind_of_value_is_told_and_the_world_goes_on(world):
    assert raised(lambda: commrt.DoubleTree).endswith(": did you mean commrt.algorithms.DoubleTree?")
    assert raised(lambda: commrt.int8).endswith("did you mean commrt.Int8?")
    replica = Loop(world, Ring()).replica
    for owner, name in ((commrt, "get_world_size"), (world, "get_world_size"), (replica, "module")):
        owned = "replica" if owner is replica else "world"
        assert f"{name!r}: use {owned}." in raised(partial(getattr, owner, name))
        assert not hasattr(owner, name)
    assert "place=3: give a function" in raised(lambda: commrt.Shares([1], 1, place=3))
    assert "device='x': give a torch.device" in raised(lambda: world.explain(4, device="x"))
    assert "ranks cannot compare" in raised(lambda: world.agree("topic", claim=world))
    world.barrier()


@pytest.mark.slow
@pytest.mark.processes
def test_new_processes_are_ranks_whose_results_or_error_return(tmp_path):
    assert commrt.spawn(os.getenv, "RANK") == ["0", "1"]
    assert raised(lambda: commrt.spawn(int, "one", ranks=1)).startswith("ValueError: invalid literal for int()")
    assert "a new process cannot find" in raised(lambda: commrt.spawn(lambda: 0))
    (script := tmp_path / "script.py").write_text("import commrt\ncommrt.spawn(print, ranks=1)\n")
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr
    assert 'in a script, call commrt.spawn() under `if __name__ == "__main__":`' in said


def test_ranks_whose_module_new_processes_cannot_import_are_refused_before_they_start():
    def body(tell):
        return tell

    body.__module__ = "tests.of_its_own"
    said = raised(partial(run_processes, 1, body))
    assert re.match("UsageError: new processes cannot import tests.of_its_own, .*: put it into a module", said)
