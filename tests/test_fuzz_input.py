# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed after ``commrt``, is in a file that it reads, or was left in the environment.

It works, or is refused in words.
"""

import json
from math import isfinite

import pytest
from commands import app, built, commands_of
from fuzzed_lines import ALGORITHM, COUNT, FILE, MANY, RANKS, SIZE, STOPPED, drawn_options, mostly, told_or_refused
from fuzzing import FILES, NUMBERS, ODD_TEXTS, TEXTS, VALUES, cases, met
from hypothesis import example, given
from hypothesis import strategies as st

from commrt.algorithms.ring import Ring
from commrt.errors import CommrtError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Pricing
from commrt.store.environment import default_timeout_s
from commrt.store.launcher import LAUNCHERS, launched
from commrt.tools.commands.draw import recorded
from commrt.tools.commands.recorded_times import read_times
from commrt.tools.measuring import probing
from commrt.tools.pictures.step_windows import compute_times_s
from commrt.tools.pictures.timelines import read_spans
from commrt.tools.planning.bounds import all_reduce_bound_s
from commrt.tools.planning.efficiency import efficiency_at
from commrt.tools.planning.workload import Workload
from commrt.transport.names import chosen_transport

pytest.importorskip("matplotlib")


# Lines after ``commrt``.

COLLECTIVES = mostly("broadcast", "scatter", "all_gather", "all_to_all", "barrier", "GATHER")
WORDS = {
    "algorithm": ALGORITHM | COLLECTIVES,
    "name": COLLECTIVES,
    "file": FILE,
    "--ranks": RANKS,
    "--workers": RANKS,
    "--seed": mostly("0", "7", bad=MANY),
    "--root": mostly("0", "1", "3", bad=MANY),
    "--schedule": mostly("tree", "ring", "direct", "bruck"),
    "--cluster": mostly("abci", "desk.toml", "/", "/dev/null", "/nowhere.toml"),
    "--wire": mostly("bf16", "fp32", "int4", "int8"),
    "--model": mostly("resnet50", "1e6", "1", "100"),
    "--out": mostly("a.svg", "a.png", "a.toml", "/nowhere/a.svg", "/a.svg/b.svg", "a/", ".svg", "."),
    "--grid": mostly("2x2", "4x1", "3x2", "0x4", "-2x-2", "٢x٢", "99999999999x1", "2 x 2", "2X2"),
    "--topology": mostly("dissemination", "hypercube"),
    "--law": mostly("paper", "exponential", "slow"),
    "--set": mostly("rate_per_s=2", "rate_per_s=nan", "low=inf", "rate_per_s=5e-324", "body_s=1e308", "=", "cap_s"),
    "--times": FILE,
    **dict.fromkeys(["--nbytes", "--bucket-cap-mb", "--compute-ms", "--jitter", "--exponent", "--timeout-s"], SIZE),
}
"""Values of arguments and options; others take small numbers."""


COMMANDS = dict(commands_of(built(app)))
del COMMANDS["doctor",]  # it takes no words, and starts processes


@st.composite
def lines(draw):
    """A line of a command; now and then with options of another one, or without what it needs."""
    names = draw(st.sampled_from(sorted(COMMANDS)))
    other = draw(st.sampled_from(sorted(COMMANDS))) if draw(st.integers(0, 7)) == 0 else names
    words, options = [*names], {}
    for param in COMMANDS[other].params:
        name = param.opts[0]
        values = None if getattr(param, "is_flag", False) else WORDS.get(name, COUNT)
        if not name.startswith("-"):
            words.append(draw(values))
        elif param.required:
            words += [name, draw(values)]
        else:
            options[name] = values
    return words + drawn_options(draw, options)


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """No worker, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    stopped = CommrtError(STOPPED)
    monkeypatch.setattr(probing, "run_workers", lambda workers, body: (_ for _ in ()).throw(stopped))


@cases(50)
@given(words=lines())
def test_any_line_is_taken_or_refused(nothing_starts, words):
    told_or_refused(app, words, may_be_silent=words[0] == "draw")


# Files: clusters, workloads, and what runs recorded.

CLUSTER = {
    "about": "'two machines'", "gpus_per_node": "4", "nodes": "2", "reduce_gbytes_per_s": "200",
    "pack_gbytes_per_s": "90", "within.latency_us": "5", "within.gbytes_per_s": "10.5", "between.latency_us": "50",
    "between.gbytes_per_s": "1", "between.nics": "2", "racks.nodes": "1", "racks.oversubscription": "3",
    "compute.resnet50": "300", "kernel_efficiency.4": "0.8",
}  # fmt: skip
OTHERS = ["name", "code_gbytes_per_s", "between.nics_per_rank", "compute", "kernel_efficiency", "within", "unknown"]
LITERALS = st.sampled_from(
    [
        "1", "0", "-1", "2", "4", "1.5", "nan", "inf", "-inf", "1e308", "5e-324", "9" * 30, "9" * 5000, "1_000",
        "0x10", "true", '"4"', '""', "[]", "[1, 2]", "{}", "{ nodes = 1 }", "{ latency_us = 1, gbytes_per_s = 1 }",
        "1979-05-27", "07:32:00", '"""\na\n"""', '"\\u0000"', "'a'",
    ]
)  # fmt: skip
KEYS = st.sampled_from([*CLUSTER, *OTHERS])
PAIRS = st.builds("{} = {}".format, KEYS | st.text(max_size=4), LITERALS)
TABLES = st.builds("[{}]".format, KEYS | st.sampled_from(["within.deeper", "[within]", "class"]))


def changed(changes):
    return "\n".join(f"{key} = {value}" for key, value in (CLUSTER | changes).items())


def priced(text):
    """What is accepted can be written, read again, and priced."""
    cluster = Cluster.parsed(text, "odd")
    assert Cluster.parsed(cluster.text(), cluster.name) == cluster
    if cluster.ranks() < 4:
        return
    seconds = Pricing(Ring().schedule(0, 4), cluster).price(1e6).seconds
    assert 0 <= all_reduce_bound_s(cluster, 4, 1e6) <= seconds * (1 + 1e-9)
    assert isfinite(seconds)
    assert 0 < efficiency_at(cluster, 3) <= 1


@cases(100)
@given(
    st.lists(PAIRS | TABLES, max_size=12).map("\n".join)
    | st.dictionaries(KEYS | st.sampled_from(["kernel_efficiency.x"]), LITERALS, max_size=2).map(changed)
)
@example(changed({"about": "9" * 5000}))
@example("about = " + "[" * 5000)
@example(changed({"compute.'a model'": "3"}))
@example(changed({"about": '"\\u007f"'}))
@example(changed({"within.latency_us": "1e308"}))
@example(changed({"within.gbytes_per_s": "5e-324"}))
@example(changed({"kernel_efficiency." + "9" * 5000: "0.5"}))
def test_a_document_is_a_cluster_or_is_refused_in_words(text):
    met(priced, text)


RUN = [
    {"ph": "X", "name": name, "pid": rank, "ts": 1000 * step + 100 * number, "dur": 90, "args": {"step": step}}
    for step in range(6)
    for rank in range(2)
    for number, name in enumerate(["forward", "backward", "wait", "optimizer"])
]
"""What a run records."""


@st.composite
def changed_runs(draw):
    """A whole run in which a few values are others."""
    events = [*RUN]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(events) - 1))
        key = draw(st.sampled_from(["name", "pid", "ts", "dur", "args", "ph", None]))
        events[place] = draw(VALUES) if key is None else RUN[place] | {key: draw(VALUES | NUMBERS)}
    return {"traceEvents": events}


RECORDS = changed_runs() | VALUES | st.lists(st.lists(NUMBERS, max_size=3), max_size=4)
LAYERS = st.fixed_dictionaries({"numel": st.integers(0, 9) | NUMBERS | VALUES, "work": NUMBERS | VALUES})
WORKLOADS = st.fixed_dictionaries({"name": st.just("mine") | VALUES, "layers": st.lists(LAYERS, max_size=4) | VALUES})


def file_of(folder, content):
    file = folder / "run.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(file)


@cases(120)
@given(content=RECORDS | FILES)
def test_any_file_gives_times_and_spans_or_is_refused_in_words(tmp_path, content):
    file = file_of(tmp_path, content)
    times = met(read_times, file)
    assert times is None or (times > 0).all()
    spans = met(read_spans, file)
    if spans is not None:
        met(compute_times_s, spans)


@cases(10)
@given(content=changed_runs() | RECORDS, step=st.none() | st.integers(-1, 7))
def test_a_picture_of_any_run_is_drawn_or_refused_in_words(tmp_path, content, step):
    met(recorded, file_of(tmp_path, content), str(tmp_path / "run.svg"), step)


@cases(75)
@given(content=WORKLOADS | VALUES | FILES)
def test_a_workload_of_any_file_gives_buckets_or_is_refused_in_words(tmp_path, content):
    workload = met(Workload.read, file_of(tmp_path, content))
    if workload is not None:
        assert 1 / 3 <= workload.buckets(1e6, 4)[-1].at <= 1 + 1e-9
        assert Workload.parsed(workload.text(), "again") == workload


# What a launcher or a user left in the environment.

NAMES = sorted(
    {name for one in LAUNCHERS for name in (one.rank, one.size, one.local_rank, one.local_size, *one.job, one.sign)}
    | {
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID",
        "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "COMMRT_TIMEOUT_S", "COMMRT_TRANSPORT",
    }
)  # fmt: skip
JOB = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "gpu[003-007,9],login1",
}  # fmt: skip
NODES = st.text(st.sampled_from("ab0129[]-,. x"), max_size=20) | TEXTS


def require_whole(env):
    met(chosen_transport, env)
    limit_s = met(default_timeout_s, env)
    assert limit_s is None or 0 < limit_s <= 2e6
    launch = launched(env)
    if launch is not None:
        assert 0 <= launch.rank < launch.size
        assert 0 < launch.port < 65536
        assert launch.local_rank >= 0
        assert launch.local_size >= 0
        assert launch.attempt >= 0
        assert launch.address == launch.address.strip() != ""


@cases(100)
@given(
    st.sampled_from([{}, JOB, SLURM]),
    st.dictionaries(st.sampled_from(NAMES), ODD_TEXTS | TEXTS | st.sampled_from(["0", "1", "3"]), max_size=3)
    | st.fixed_dictionaries({"SLURM_STEP_NODELIST": NODES}),
)
@example(JOB, {"LOCAL_RANK": "-1"})
@example(JOB, {"TORCHELASTIC_RESTART_COUNT": "-1"})
@example(JOB, {"MASTER_ADDR": " "})
@example(JOB, {"MASTER_ADDR": "a\nb"})
@example(JOB, {"MASTER_PORT": "29500x"})
@example(SLURM, {"SLURM_STEP_ID": "²"})
@example(SLURM, {"SLURM_STEP_ID": "9" * 5000})
@example(SLURM, {"SLURM_STEP_NODELIST": "["})
def test_an_environment_that_someone_changed_is_a_launch_or_is_refused_in_words(whole, changes):
    met(require_whole, whole | changes)
