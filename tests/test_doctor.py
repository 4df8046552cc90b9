# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: each thing that it would say, and that what it looks at cannot end it."""

import json
import os
import re
import resource
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import for_each
from commands import Runner, app, invoke

import commrt
from commrt.kernels.dispatch import TRITON_AT_LEAST
from commrt.store.environment import VARIABLES
from commrt.store.launcher import Launch, launched
from commrt.testing.workers import run_workers
from commrt.tools.commands.machine import examine
from commrt.tools.measuring import doctor_exchange, doctor_machine
from commrt.tools.measuring.doctor_environment import AT_LEAST, HARMS, MISSING, launcher, packages, variables
from commrt.tools.measuring.doctor_machine import gpus
from commrt.transport.names import TRANSPORTS

ROOT = Path(__file__).parent.parent
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # nothing that is forked here computes


def only(findings):
    (finding,) = findings
    return finding


def launch_of(size, local_size):
    return Launch("torchrun", 0, size, 0, local_size, "127.0.0.1", 29500)


GOOD = {name: AT_LEAST.get(name, "0.1") for name in MISSING if name != "cupy"}
GOOD |= {"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.30.7"}
TWO_CUPYS = GOOD | {"cupy-cuda12x": "14.2.0"}
TWO_NCCLS = GOOD | {"nvidia-nccl-cu12": "2.30.7"}


def test_what_fits_is_ok():
    found = {each.detail: each.verdict for each in packages(GOOD, "13.0")}
    assert "14.2.0 (cupy-cuda13x)" in found
    assert {*found.values()} == {"ok"}


@for_each(
    ("installed", "cuda", "name", "advice"),
    [
        (TWO_CUPYS, "13.0", "cupy-cuda13x and cupy-cuda12x", "pip uninstall .*, then install the one for CUDA 13.0"),
        (TWO_CUPYS, None, "cupy-cuda13x and cupy-cuda12x", "install the one for CUDA of your torch"),
        (TWO_NCCLS, "13.0", "nvidia-nccl-cu12", "then pip install nvidia-nccl-cu13"),
        ({"cupy-cuda12x": "14.2.0"}, "13.0", "cupy-cuda12x", "uninstall cupy-cuda12x, then pip install cupy-cuda13x"),
        ({"cupy-cuda12x": "13.6.0"}, None, "cupy", "'cupy-cuda12x>=14.2'"),
        ({"torch": "2.5.1"}, None, "torch", "'torch>=2.9'"),
    ],
)
def test_what_does_not_fit_is_a_problem_and_says_what_to_install(installed, cuda, name, advice):
    findings = [each for each in packages(installed, cuda) if (each.name, each.verdict) == (name, "problem")]
    assert re.search(advice, only(findings).advice)


def test_what_is_not_installed_is_absent_but_torch_and_numpy_are_problems():
    advice = {each.name: each.advice for each in packages({}, None) if each.verdict != "absent"}
    assert advice == {"torch": "Install torch first, then commrt: pip install torch.", "numpy": "pip install numpy."}


def test_the_tables_say_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (*project["dependencies"], *extras["cuda12"], *extras["cuda13"], *extras["cpu"])
    asked = dict(line.split(">=") for line in lines)
    assert AT_LEAST["triton"] == TRITON_AT_LEAST
    known = asked.keys() & AT_LEAST
    assert {name: AT_LEAST[name] for name in known} == {name: asked[name] for name in known}


@for_each("name", HARMS)
def test_each_variable_of_the_table_is_found_when_it_hurts_and_not_otherwise(name):
    value = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}.get(name, "1")
    assert HARMS[name][1] in only(variables({name: value}, ())).detail
    assert [*variables({name: "0"}, ())] == []


@for_each(
    ("name", "value", "verdict", "advice"),
    [
        ("GLOO_SOCKET_IFNAME", "lo,eth9", "problem", "Set it to one of lo, eth0, or unset it."),
        ("COMMRT_TRANPORT", "gloo", "warning", "Did you mean COMMRT_TRANSPORT?"),
    ],
)
def test_interfaces_that_are_not_there_and_variables_that_nobody_reads_are_found(name, value, verdict, advice):
    innocent = {"PATH": "/bin", "NCCL_DEBUG": "WARN", "COMMRT_NVTX": "0", "COMMRT_TRANSPORT": "gloo"}
    finding = only(variables({"GLOO_SOCKET_IFNAME": "eth0", **innocent, name: value}, ("lo", "eth0")))
    assert (finding.name, finding.verdict, finding.advice) == (name, verdict, advice)


def test_the_known_variables_are_those_that_the_package_reads_and_a_page_explains():
    for paths in ((ROOT / "commrt").rglob("*.py"), ROOT.glob("docs/environment.md")):
        assert set(re.findall(r"COMMRT_[A-Z_]+", "".join(path.read_text() for path in paths))) == set(VARIABLES)


@for_each(
    ("env", "launch", "verdict"),
    [({"MASTER_PORT": "29500"}, None, "warning"), ({"MASTER_PORT": "29500"}, launch_of(2, 2), "ok"), ({}, None, "ok")],
)
def test_an_address_without_ranks_is_half_a_launch(env, launch, verdict):
    finding = only(launcher(env, launch))
    assert (finding.verdict, "makes a world of one" in finding.detail) == (verdict, launch is None)


# GPUs, which a stand-in for torch.cuda has.


def cuda_of(count=2, capability=(9, 0), peers=True, broken=None):
    """Return a stand-in with so many GPUs of one kind, of which number `broken` runs no kernel."""
    major, minor = capability

    def run_kernel(number):
        if number == broken:
            raise RuntimeError("no kernel image")

    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30, major=major, minor=minor)
    return SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_properties=lambda number: gpu,
        can_device_access_peer=lambda device, peer: peers,
        run_kernel=run_kernel,
    )


@for_each(
    ("cuda", "built_for", "driver", "verdicts", "words"),
    [
        (cuda_of(), "13.0", "/", ["ok", "ok", "ok"], "NVIDIA H200, 139 GiB, compute capability 9.0"),
        (cuda_of(broken=1), "13.0", "/", ["ok", "problem", "ok"], "gpu 1 RuntimeError: no kernel image"),
        (cuda_of(capability=(7, 5)), "12.8", "/", ["warning", "warning", "ok"], "make gpu"),
        (cuda_of(3, peers=False), "13.0", "/", ["ok", "ok", "ok", "warning"], "GPUs 0 and 1, 0 and 2, 1 and 2:"),
        (cuda_of(0), None, "/none", ["absent"], "commrt runs on the CPU here."),
        (cuda_of(0), None, "/", ["warning"], "built without CUDA"),
        (cuda_of(0), "13.0", "/", ["warning"], "torch for CUDA 13.0 can use no GPU"),
    ],
)
def test_gpus_are_named_with_what_is_wrong_with_them(cuda, built_for, driver, verdicts, words, monkeypatch):
    monkeypatch.setattr(doctor_machine, "run_kernel", cuda.run_kernel)
    found = [*gpus(cuda, built_for, Path(driver))]
    assert [each.verdict for each in found] == verdicts
    assert words in " ".join(f"{each.name} {each.detail} {each.advice}" for each in found)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(doctor_exchange, "LIMIT_S", 30.0)


def test_too_few_files_for_the_ranks_of_a_launch_are_a_problem(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = only(doctor_machine.files(launch_of(64, 8)))
    assert (finding.verdict, finding.advice) == ("problem", "Raise it with ulimit -n 418, in this shell.")
    finding = only(doctor_machine.files(launch_of(8, 8)))
    assert (finding.verdict, finding.detail) == ("ok", "at most 256 in a process; a rank of 8 needs 82")


@FORKS
def test_a_rank_holds_at_most_as_many_files_as_was_counted():
    def held():
        with commrt.init(20.0):
            return {*Path("/proc/self/fd").iterdir()}

    inherited = {*Path("/proc/self/fd").iterdir()}
    assert max(len(files - inherited) for files in run_workers(4, held).values()) <= doctor_machine.needed_files(4)


@for_each(("text", "cpus"), [("150000 100000", 1.5), ("max 100000", 8), ("800000 50000", 8), ("", 8)])
def test_processors_are_counted_by_affinity_and_quota(text, cpus, tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(doctor_machine, "QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert doctor_machine.cpus() == cpus


@for_each(
    ("launch", "threads", "verdict", "advice"),
    [
        (launch_of(8, 8), 1, "warning", "Start 4 ranks here"),
        (launch_of(2, 2), 4, "warning", "OMP_NUM_THREADS=2"),
        (launch_of(4, 4), 1, "ok", ""),
        (None, 4, "ok", ""),
        (None, 5, "warning", "OMP_NUM_THREADS=4"),
    ],
)
def test_more_ranks_or_threads_than_processors_are_a_warning(launch, threads, verdict, advice, monkeypatch):
    monkeypatch.setattr(doctor_machine, "cpus", lambda: 4)
    finding = only(doctor_machine.processors(launch, threads))
    assert (finding.verdict, advice in finding.advice) == (verdict, True)


@FORKS
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_processes_exchange_over_the_transport_that_was_chosen(transport, monkeypatch):
    variables = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    for name, value in (variables | {"COMMRT_TRANSPORT": transport}).items():
        monkeypatch.setenv(name, value)
    finding = only(doctor_exchange.exchange())
    assert (finding.verdict, finding.facts["transport"]) == ("ok", transport), finding
    assert finding.facts["latency_us"] > 0
    assert f"all_reduce of 1,024 B run one-shot over {transport} as float32" in finding.detail
    assert launched().rank == 5
    assert transport in doctor_exchange.EXCHANGE_ADVICE


@FORKS
def test_sums_that_are_wrong_are_a_problem(monkeypatch):
    measure = doctor_exchange.measure
    monkeypatch.setattr(doctor_exchange, "measure", lambda schedule: measure(schedule)._replace(wrong=3))
    finding = only(doctor_exchange.exchange())
    assert (finding.verdict, "6 elements are wrong" in finding.detail) == ("problem", True)


@FORKS
def test_an_exchange_that_hangs_ends_with_its_deadline(monkeypatch):
    def hang(_):
        os.read(os.pipe()[0], 1)  # nobody writes

    monkeypatch.setattr(doctor_exchange, "measure", hang)
    monkeypatch.setattr(doctor_exchange, "LIMIT_S", 0.5)
    finding = only(doctor_exchange.exchange())
    assert finding.verdict == "problem"
    assert "workers [0, 1] still ran after 0.5 s" in finding.detail
    assert "COMMRT_TRANSPORT=gloo" in finding.advice


# NCCL, of which a stand-in tells versions.


@for_each(
    ("runtime", "of_torch", "copies", "verdict", "detail"),
    [
        (23007, "2.30.7", 1, "ok", "2.30.7, CuPy was built with 2.27.7, torch links 2.30.7"),
        (23007, None, 1, "ok", "torch has none of its own"),
        (21705, "2.17.5", 1, "problem", "2.17.5"),
        (23007, "2.28.9", 1, "warning", "torch links 2.28.9"),
        (23007, "2.30.7", 2, "warning", "loaded: /0/libnccl.so.2, /1/libnccl.so.2"),
    ],
)
def test_the_nccl_of_cupy_and_of_torch_must_be_one(runtime, of_torch, copies, verdict, detail, monkeypatch):
    binding = SimpleNamespace(get_version=lambda: runtime, get_build_version=lambda: 22707)
    monkeypatch.setattr("commrt.transport.nccl_binding.load", lambda: binding)
    monkeypatch.setattr(doctor_machine, "_nccl_of_torch", lambda: of_torch)
    monkeypatch.setattr(doctor_machine, "nccl_files", lambda: [f"/{each}/libnccl.so.2" for each in range(copies)])
    finding = only(doctor_machine.nccl())
    assert (finding.verdict, detail in finding.detail) == (verdict, True)


def test_a_torch_that_cannot_be_imported_is_one_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("COMMRT_TRANPORT", "gloo")
    found = [*examine()]
    assert [each.name for each in found if "cannot be imported" in each.detail] == ["torch"]
    assert found[-1].name == "COMMRT_TRANPORT"
    assert "exchange" not in {each.name for each in found}


@FORKS
def test_doctor_finds_nothing_wrong_here(monkeypatch):
    monkeypatch.setenv("COMMRT_TIMEOUT_S", "600")
    record = json.loads(invoke("doctor --json").stdout)
    found = {finding["name"]: finding for finding in record["findings"]}
    assert record["ok"]
    assert {"python", "torch", "cupy", "launcher", "timeouts", "gpu", "exchange"} <= found.keys()
    assert found["torch"]["detail"] == metadata.version("torch")
    assert "a rank of 1 needs 40" in found["open files"]["detail"]
    limits = "probe 2 s < step 300 s < collective 600 s <= start 1200 s"
    assert found["timeouts"]["detail"].startswith(limits)


def test_doctor_ends_with_1_if_training_would_fail_and_says_why_in_80_columns(monkeypatch):
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("COMMRT_TIMEOUT_S", "soon")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    result = Runner().invoke(app, ["doctor", "--quick"], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    assert max(map(len, result.output.splitlines())) <= 80
    for words in ("unset it", "WORLD_SIZE", "COMMRT_TIMEOUT_S", "CUDA_DEVICE_MAX_CONNECTIONS"):
        assert words in result.output
