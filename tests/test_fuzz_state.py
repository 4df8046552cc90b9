# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a checkpoint: it is taken, or refused in words before anything changes; and nothing in it is run."""

import importlib.util
import io
import os
import pickle
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from cases import for_each
from fuzzing import FILES, NUMBERS, VALUES, cases, met
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import commrt
from commrt.backup_workers.replica_state import Snapshot, StateTransfer, pack, unpack
from commrt.data.large_batch import BatchSizeControl, Rate
from commrt.data.ring_shuffle import RingShuffle
from commrt.data.shares import Shares
from commrt.errors import DisagreementError
from commrt.testing.ranks import local_worlds
from commrt.training.stateful import dump, load

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:TypedStorage")
EXAMPLE = Path(__file__).parent.parent / "examples/imagenet_resnet50.py"
STATES = VALUES | st.dictionaries(st.sampled_from(["step", "algorithm"]), VALUES | NUMBERS)
SNAPSHOT = Snapshot(version=3, optimizer_steps=3, order=None, session=1, in_pass=True, is_due=False, stopping=[])
PACKED = pack(StateTransfer(SNAPSHOT, *[torch.zeros(4, dtype=torch.uint8)] * 3))


def packed_with(place, value):
    """Return a packed state with `value` at `place` of its snapshot."""
    fields = [*SNAPSHOT[:place], value, *SNAPSHOT[place + 1 :]]
    return pack(StateTransfer(fields, *[torch.zeros(4, dtype=torch.uint8)] * 3))


class Evil:
    def __reduce__(self):
        return os.abort, ()


def changed(whole):
    """`whole` with a piece of it cut out, or other bytes put in."""
    places = st.integers(0, len(whole))
    return st.builds(lambda at, skip, new: whole[:at] + new + whole[at + skip :], places, places, st.binary(max_size=8))


@pytest.fixture(
    scope="module", params=[commrt.Ring(), commrt.Gossip(), commrt.BackupWorkers(0)], ids=["ring", "gossip", "backup"]
)
def replica(request):
    (world,) = local_worlds(1)
    model = nn.Linear(2, 2)
    with world:
        yield commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), request.param, world=world)


@cases(40)
@given(state=STATES)
@example(state={"step": True})
@example(state={"step": 10**30})
@example(state={"step": -1})
@example(state={})
def test_a_replica_takes_a_state_or_refuses_it_and_goes_on(replica, state):
    before = replica.step
    if met(lambda: (replica.load_state_dict(state), True)) is None:
        assert replica.step == before
    replica.load_state_dict(replica.state_dict())


SHUFFLES = st.fixed_dictionaries(
    {},
    optional={
        "passes": st.integers(0, 20) | VALUES,
        "taken": st.integers(0, 5) | VALUES,
        "samples": VALUES | st.just([torch.zeros(8, 2)]) | st.just([torch.zeros(8)]) | st.just((torch.zeros(8, 2),)),
    },
)


@cases(100)
@given(SHUFFLES | VALUES)
@example({"passes": 0, "taken": 0})
@example({"passes": 0, "taken": 0, "samples": [torch.zeros(8, 2)]})
@example({"passes": "0", "taken": 0, "samples": [torch.zeros(8, 2)]})
@example({"passes": 0, "taken": 5, "samples": [torch.zeros(8, 2)]})
@example({"passes": 0, "taken": 0, "samples": [None]})
def test_a_ring_shuffle_takes_a_state_or_refuses_it_and_goes_on(state):
    (world,) = local_worlds(1)
    with world:
        shuffle = RingShuffle([torch.ones(8, 2)], batch_size=2, world=world)
        before = shuffle.state_dict()["samples"][0]
        if met(lambda: (shuffle.load_state_dict(state), True)) is None:
            assert torch.equal(shuffle.state_dict()["samples"][0], before)
        for _ in shuffle:
            pass


COUNTS = st.integers(0, 30) | VALUES | NUMBERS


@cases(100)
@given(
    VALUES | st.fixed_dictionaries({}, optional={"epochs": COUNTS}),
    VALUES
    | st.fixed_dictionaries(
        {}, optional={"epochs": COUNTS, "highest": VALUES | st.lists(NUMBERS, min_size=1, max_size=1)}
    ),
)
@example({"epochs": 1.1}, {"epochs": 10**9, "highest": [0.1]})
@example({"epochs": 10**30}, {"epochs": 3, "highest": []})
@example({"epochs": -1}, {"epochs": 3, "highest": [float("nan")]})
@example({}, {"epochs": 0, "highest": [10**400]})
@example({"epochs": float("nan")}, {"highest": [0.1], "epochs": float("inf")})
def test_a_recipe_takes_a_state_or_refuses_it_and_goes_on(of_batches, of_rate):
    control = BatchSizeControl(range(100), {0: 10, 2: 50})
    rate = Rate(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), control, epochs=4, warmup_epochs=0)
    met(control.load_state_dict, of_batches)
    met(rate.load_state_dict, of_rate)
    assert len(list(control)) in range(11)
    rate.step()


FIELDS = {name: st.integers(0, 8) | VALUES for name in ("size", "seed", "epoch")}
TODO = st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2), max_size=3)


@cases(60)
@given(VALUES | st.fixed_dictionaries(FIELDS | {"size": st.just(8), "todo": TODO | VALUES}))
@example({"size": 8, "seed": 0, "epoch": 1, "todo": [[4, 8], [0, 5]]})
@example({"size": 8, "seed": 0, "epoch": 1, "todo": [[4, 4]]})
@example({"size": 8, "seed": 0, "epoch": 1, "todo": [[0, 9]]})
@example({"size": 8, "seed": 0, "epoch": 1, "todo": []})
def test_shares_take_a_state_or_refuse_it_and_go_on(state):
    shares = Shares(range(8), 2, place=lambda: (0, 1))
    before = shares.state_dict()
    if met(lambda: (shares.load_state_dict(state), True)) is None:
        assert shares.state_dict() == before
    left = [sample for batch in shares for sample in batch]
    assert left
    assert len({*left}) == len(left)


def owner():
    param = torch.ones(2, requires_grad=True)
    adam = torch.optim.Adam([param])
    param.sum().backward()
    adam.step()
    return adam


STATE = bytes(dump([owner()]).tolist())


@cases(60)
@given(changed(STATE) | FILES)
@example(pickle.dumps(Evil()))
@example(b"")
def test_what_another_rank_sends_of_its_optimizers_is_taken_or_refused_and_never_run(said):
    met(lambda: load(torch.tensor(list(said), dtype=torch.uint8), [owner()]))


@cases(60)
@given(changed(PACKED) | FILES | st.builds(packed_with, st.integers(0, 4), VALUES))
@example(pickle.dumps(Evil()))
@example(pickle.dumps([1, 2]))
@example(b"")
def test_what_another_rank_gives_as_its_state_is_taken_or_refused_and_never_run(said):
    met(unpack, said)
    assert unpack(PACKED).snapshot.version == 3


WRONG = [(0, -1), (0, "3"), (1, None), (2, ["a"]), (2, 7), (3, 0.5), (4, 1)]


@for_each("packed", [*(packed_with(*each) for each in WRONG), b"nothing", pickle.dumps(Evil())])
def test_a_state_of_a_step_that_is_none_is_refused(packed):
    with pytest.raises(DisagreementError, match=r"state of another rank.* cannot be parsed"):
        unpack(packed)


@pytest.fixture(scope="module")
def example_program():
    pytest.importorskip("PIL")
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


@for_each(
    "contents",
    [b"", pickle.dumps(Evil()), saved(Evil()), saved({"model": 1}), saved([1]), saved([torch.ones(99)])[:-50], None],
    ids=["empty", "evil", "evil in torch's way", "other", "list", "cut", "folder"],
)
def test_the_example_refuses_what_is_no_checkpoint_in_one_line(example_program, tmp_path, contents):
    path = Path(mkdtemp(dir=tmp_path)) / "last.pt"
    path.mkdir() if contents is None else path.write_bytes(contents)
    with pytest.raises(SystemExit, match=r"last\.pt (cannot be read as a|is no) checkpoint"):
        example_program.checkpoint(path, {"model", "epoch"}, torch.device("cpu"))
