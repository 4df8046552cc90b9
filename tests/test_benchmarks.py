# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the kernels, and the checks made for a GPU, run everywhere, without a GPU on plain torch."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from math import prod
from pathlib import Path

import pytest
import torch
from matplotlib import rc_context

BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chosen"), [("test_on_gpu.py", ""), ("test_kernels.py", "GoogLeNet and mix or reduce")]
)
def test_a_benchmark_of_the_kernels_runs(name, chosen):
    options = ["-q", "-p", "no:cacheprovider", "--benchmark-disable", "-k", chosen]
    command = [sys.executable, "-m", "pytest", str(BENCH / name), *options]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, cwd=BENCH.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_measured_of_a_contender_that_does_something_else(bench_folder):
    import kernel_variants  # noqa: PLC0415  # of the folder bench

    for make in (kernel_variants.pack, kernel_variants.unpack, kernel_variants.mix):
        task = make([(10, 10), (7,)], torch.float32)
        kernel_variants.gate(task)
        task.contenders[kernel_variants.OURS] = lambda _: None
        with pytest.raises(RuntimeError, match=r"commrt is off by .*: nothing was measured"):
            kernel_variants.gate(task)


def recorded():
    """All records by suite, case and variant. They need the fixture `bench_folder`."""
    import records  # noqa: PLC0415

    found = records.read(sorted((BENCH / "results").glob("*.jsonl")))
    return {(one["suite"], one["case"], one["variant"]): one for one in found}


def ratio(found, suite, variant):
    """The recorded ratio of a step to DDP's, or of an exchange between hosts to Gloo's, as pages print it."""
    case, peer = {"step": ("4 processes", "ddp"), "netlab": ("exchange", "Gloo all_reduce, fp32")}[suite]
    one = found[suite, case, variant]
    assert one["peer"] == peer
    return f"{one['ratio']:.2f}"


def test_the_page_of_benchmarks_is_that_of_the_records(bench_folder):
    import report  # noqa: PLC0415

    found = list(recorded().values())
    drawn = [suite for suite, _ in report.sections(found) if suite in report.PICTURED]
    assert (BENCH.parent / "docs" / "benchmarks.md").read_text() == report.document(found, drawn)


FIRST_TABLE = {
    "`Torus2D()`, `Ring()`, `HalvingDoubling()`": ("step", ["torus2d fp32", "ring fp32", "halving_doubling fp32"]),
    '`Torus2D()` with `gradients="views"`': ("step", ["torus2d views"]),
    '`init_process_group("commrt")`': ("step", ["ddp, backend commrt"]),
    "`Direct(within=2)`, `wire=Int4()`": ("netlab", ["direct within, int4 + feedback"]),
    "`Gossip()`, `Gossip(within=2)`": ("netlab", ["gossip, fp32", "hierarchical gossip, fp32"]),
}
"""Rows of the first table of the README and of the site: the suite, and the variants in the order of their figures."""


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_table_says_what_was_recorded(page, bench_folder):
    found, text = recorded(), (BENCH.parent / page).read_text()
    for start, (suite, variants) in FIRST_TABLE.items():
        measured = re.search(rf"^\| {re.escape(start)} \|.*\| (.*) \|$", text, re.MULTILINE)[1]
        assert re.findall(r"\d\.\d\d", measured) == [ratio(found, suite, variant) for variant in variants], start


def test_the_page_of_an_algorithm_says_what_was_recorded(bench_folder):
    found = recorded()
    for name in ("ring", "halving_doubling", "torus2d"):
        page = " ".join((BENCH.parent / "docs" / "algorithms" / f"{name}.md").read_text().split())
        fp32, bf16 = (ratio(found, "step", f"{name} {wire}") for wire in ("fp32", "bf16"))
        assert f"a step takes {fp32} of DDP's time (fp32) and {bf16} (bf16)" in page
        assert f"{ratio(found, 'netlab', f'{name}, fp32')} of the time of Gloo's" in page


def test_a_table_says_where_a_peer_is_faster(bench_folder):
    import records  # noqa: PLC0415
    import report  # noqa: PLC0415

    times = {"ours": [3.0, 3.0], "theirs": [2.0, 2.0]}
    found = list(records.made("step", "4 processes", times, dict.fromkeys(times, "theirs")))
    page = report.document(found)
    assert "| | ms | ratio to theirs |" in page
    assert "| ours | 3000.0 (3000.0 .. 3000.0) | **1.50** (1.50 .. 1.50) |" in page


def test_the_ceiling_is_told_in_json(bench_folder, monkeypatch):
    import machine_limits  # noqa: PLC0415  # of the folder bench

    monkeypatch.setattr(machine_limits, "NBYTES", (1 << 16,))
    monkeypatch.setattr(machine_limits, "copies", machine_limits.copies.__wrapped__)
    assert max(json.loads(json.dumps(machine_limits.report()))["copy_bytes_per_s"].values()) > 0


@pytest.mark.slow  # Triton, not its interpreter
def test_the_tuner_says_that_it_measured_nothing_without_a_gpu():
    code = "import tune_kernels; tune_kernels.CANDIDATES = tune_kernels.CANDIDATES[:1]; tune_kernels.describe(90)"
    env = {**os.environ, "PYTHONPATH": str(BENCH), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert "from compiled code, not measured" in done.stdout


@pytest.mark.slow
def test_the_check_of_a_gpu_writes_one_record(tmp_path):
    command = [sys.executable, str(BENCH / "gpu_check.py"), "correctness", "--out", str(tmp_path), "--only", "can two"]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    (stage,) = record["stages"]
    assert (record["device"], stage["passed"], stage["failed"], stage["trouble"]) == ("CPU", 1, [], None)
    assert len(stage["figures"][0]["seconds per exchange of 1 MiB"][0]) == 10


@pytest.mark.slow
def test_a_check_of_a_gpu_that_is_interrupted_leaves_its_record_and_no_process(tmp_path):
    command = [sys.executable, str(BENCH / "gpu_check.py"), "correctness", "--out", str(tmp_path), "--only", "can two"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as check:
        assert check.stdout.readline().startswith("record: ")
        check.terminate()
        check.stdout.read()  # ends when all processes that could print are gone
        assert check.wait() == 1
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["part"] == "correctness"
    assert not any(stage["passed"] for stage in record["stages"])


@pytest.mark.slow
def test_the_cost_of_a_step_on_the_store_is_printed_as_json():
    command = [sys.executable, str(BENCH / "store_requests.py"), "--ranks", "4", "--steps", "2", "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    rows = json.loads(done.stdout)
    assert [row["operations"] for row in rows] == [4, 4, 4]  # last and first, early, late


@pytest.mark.processes
def test_a_killed_rank_is_noticed_before_the_others_raise_that_and_long_before_the_timeout(bench_folder):
    import notice  # noqa: PLC0415

    killed = notice.CASES[0]
    seen_s, raised_s = notice.noticed_s(killed, seed=0)
    assert 0 < seen_s <= raised_s < notice.TIMEOUT_S


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_nothing_is_measured_of_an_exchange_that_ends_with_something_else(wrong, bench_folder):
    import exchanges  # noqa: PLC0415

    data = torch.zeros(10)
    way = exchanges.Exchange(data, lambda _: data.fill_(wrong), [3.0], torch.float32)
    with pytest.raises(RuntimeError, match="nothing was measured"):
        way.check("a way", rank=0)


def replayed(name):
    import exchanges  # noqa: PLC0415  # of the folder bench

    return exchanges.replayed(exchanges.algorithms(hosts=4, per_host=2)[name].schedule(0, 8))


def test_a_cluster_of_namespaces_must_end_with_the_sum_that_the_schedule_makes(bench_folder):
    sums = {name: replayed(name) for name in ("ring", "halving_doubling", "torus2d")}
    assert [name for name, state in sums.items() if not (state == 36.0).all()] == []


def test_a_cluster_of_namespaces_must_end_with_the_mean_that_gossip_keeps(bench_folder):
    for name, added in (("gossip", 1), ("hierarchical gossip", 2)):  # in rows, which divide before
        state = replayed(name)
        assert state.mean() == 4.5 * added, name  # the mean of 1 to 8
        assert 1.0 * added <= state.min() < state.max() <= 8.0 * added, name


def test_a_cluster_of_namespaces_needs_root_and_says_so(monkeypatch, bench_folder):
    import network_hosts  # noqa: PLC0415

    monkeypatch.setattr(network_hosts.shutil, "which", lambda _: "/sbin/ip")
    monkeypatch.setattr(network_hosts.os, "geteuid", lambda: 1000)
    assert (
        network_hosts.missing()
        == "only root may make network namespaces: run this with sudo, or in a container that may"
    )


def test_records_say_where_they_were_made_and_the_last_one_of_a_kind_counts(tmp_path, bench_folder):
    import records  # noqa: PLC0415

    file = tmp_path / "deep" / "records.jsonl"
    for seconds in (1.0, 2.0):
        times = {"ours": [seconds, seconds], "theirs": [4.0, 4.0]}
        records.append(file, records.made("step", "ResNet-50", times, {"ours": "theirs"}, nbytes=7))
    (one,) = records.read([file])
    assert (one["median_s"], one["ratio"], one["nbytes"]) == (2.0, 0.5, 7)
    assert torch.__version__.startswith(one["torch"])  # which may add the version of CUDA
    assert {"date", "commit", "device", "cores", "python"} <= one.keys()


@pytest.fixture
def bench_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


SPEC = importlib.util.spec_from_file_location("gradient_sets", BENCH / "model_gradients.py")
gradient_sets = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gradient_sets)

PUBLISHED = {
    "ResNet-50": (161, 25_557_032, 2_359_296),
    "GoogLeNet": (173, 6_624_904, 1_024_000),
    "GoogLeNet with aux": (187, 13_004_888, 2_097_152),
    "VGG-16": (32, 138_357_544, 102_760_448),
    "VGG-19": (38, 143_667_240, 102_760_448),
    "BERT-large": (398, 336_226_108, 31_254_528),
    "BERT-large encoder": (391, 335_141_888, 31_254_528),
    "GPT-2 124M": (148, 124_439_808, 38_597_376),
    "GPT-2 1.5B": (580, 1_557_611_200, 80_411_200),
    "Llama-3-8B layer": (9, 218_112_000, 58_720_256),
    "Llama-3-8B": (291, 8_030_261_248, 525_336_576),
    "10,000 tensors of 64": (10_000, 640_000, 64),
}


def test_every_gradient_set_has_as_many_tensors_and_elements_as_the_model():
    sizes = {name: [prod(shape) for shape in shapes().values()] for name, shapes in gradient_sets.SETS.items()}
    assert {name: (len(each), sum(each), max(each)) for name, each in sizes.items()} == PUBLISHED


def kernel(name, begin, correlation, stream=7):
    args = {"stream": stream, "correlation": correlation}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": 10.0, "args": args}


def of_the_host(category, name, begin, duration, **args):
    return {"cat": category, "name": name, "ts": begin, "dur": duration, "args": args}


def made_up_step(begin, number):
    yield of_the_host("user_annotation", "training step", begin, 90.0)
    for place, part in enumerate(("forward", "backward", "optimizer")):
        at = begin + 30.0 * place
        yield of_the_host("user_annotation", part, at, 30.0)
        yield of_the_host("cuda_runtime", "cudaLaunchKernel", at + 1.0, 2.0, correlation=10 * number + place)
        yield kernel("at::native::reduce_kernel<512>", at + 5.0, 10 * number + place)
    yield of_the_host("cuda_runtime", "cudaLaunchKernel", begin + 40.0, 2.0, correlation=10 * number + 5)
    yield kernel("meet_kernel", begin + 45.0, None, stream=20)
    yield kernel("copy", begin + 55.0, 10 * number + 5, stream=20)
    yield of_the_host("cpu_op", "commrt::bucket: number 0, algorithm direct", begin + 35.0, 20.0)


def test_a_profile_has_the_kernels_of_one_step_by_class_and_stream(bench_folder):
    import profiled_step  # noqa: PLC0415

    events = [event for number in range(3) for event in made_up_step(100.0 * number, number)]
    profile = profiled_step.read_trace(events)
    kernels = [(profiled_step.CLASSES[kind], *rest) for kind, *rest in profile.kernels]
    assert kernels == [
        ("forward", 0, 0.0, 10.0),
        ("backward", 0, 30.0, 10.0),
        ("meet", 1, 40.0, 10.0),
        ("copy", 1, 50.0, 10.0),
        ("optimizer", 0, 60.0, 10.0),
    ]
    assert (profile.us, profile.host) == (100.0, [("bucket: number 0, algorithm direct", 30.0, 20.0)])


def test_a_profile_without_a_gpu_is_empty(bench_folder):
    import profiled_step  # noqa: PLC0415

    events = [event for event in made_up_step(0.0, 0) if event["cat"] != "kernel"]
    assert profiled_step.read_trace(events) == (0.0, [], [])


CONTROL = """#!/bin/sh
echo "$@ $(test $# = 0 && cat) in $CUDA_MPS_PIPE_DIRECTORY" >> $TOLD
exit $FAILS
"""


@pytest.fixture
def served(bench_folder, tmp_path, monkeypatch):
    """Return a function that enters a stage's service; returns its variables, the outcome's words, what was told."""
    import gpu_check  # noqa: PLC0415

    program, told = tmp_path / gpu_check.MPS_CONTROL, tmp_path / "told"
    monkeypatch.delenv(gpu_check.MPS_FOLDER, raising=False)
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setenv("FAILS", "0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def enter(*, mps=True, installed=True, fails="0"):
        monkeypatch.setenv("FAILS", fails)
        if installed:
            program.write_text(CONTROL)
            program.chmod(0o755)
        outcome = gpu_check.Outcome("a stage")
        with gpu_check.served(gpu_check.Stage("a stage", [], 1.0, mps=mps), outcome) as variables:
            pass
        return variables, outcome.mps, told.read_text().splitlines() if told.exists() else []

    return enter


def test_a_stage_that_needs_mps_has_a_daemon_of_its_own_and_ends_it(served):
    variables, mps, told = served()
    folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
    assert (mps, told) == ("own daemon", [f"-d  in {folder}", f" quit in {folder}"])


def test_a_stage_that_needs_no_mps_has_none(served):
    assert served(mps=False) == ({}, "not used", [])


@pytest.mark.parametrize(
    ("case", "said"),
    [({"installed": False}, "nvidia-cuda-mps-control is not installed"), ({"fails": "1"}, "the daemon did not begin")],
)
def test_a_stage_that_gets_no_daemon_says_why(case, said, served):
    variables, mps, _ = served(**case)
    assert (variables, mps) == ({}, said)


def test_a_stage_leaves_a_daemon_that_was_there_before_alone(served, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    assert served() == ({}, "by CUDA_MPS_PIPE_DIRECTORY, which was set before", [])


@pytest.fixture
def step_picture(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH.parent / "docs" / "site"))
    with rc_context():  # it lets pictures hold text, which other tests would see
        yield import_module("step_picture")


def test_a_profile_becomes_a_picture(step_picture, bench_folder, tmp_path, monkeypatch):
    import profiled_step  # noqa: PLC0415

    events = [event for number in range(3) for event in made_up_step(100.0 * number, number)]
    profiles = {"direct": profiled_step.read_trace(events)._asdict()}
    record = {"about": {"workload": "m", "gpu": "g"}, "classes": profiled_step.CLASSES, "profiles": profiles}
    profiled_step.write(tmp_path / "record.json", record)
    picture = tmp_path / "step.svg"
    monkeypatch.setattr(sys, "argv", ["step_picture", str(tmp_path / "record.json"), "--out", str(picture)])
    assert step_picture.main() == 0
    assert "exchange, stream 1" in picture.read_text()


@pytest.mark.parametrize(
    ("record", "said"), [(None, "no record"), ({"profiles": {"DDP": {"kernels": []}}}, "holds no kernels")]
)
def test_a_picture_without_kernels_says_what_to_run(record, said, step_picture, tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    if record is not None:
        path.write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["step_picture", str(path)])
    assert step_picture.main() == 1
    assert said in (printed := capsys.readouterr().out)
    assert "make gpu-link" in printed
