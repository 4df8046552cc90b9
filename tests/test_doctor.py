# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: each thing that it would say, and that what it looks at cannot end it."""

from __future__ import annotations

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
from commands import invoke
from typer.testing import CliRunner

from commrt.errors import CommrtError
from commrt.kernels.dispatch import TRITON_AT_LEAST
from commrt.store.launcher import TRANSPORTS, VARIABLES, Launch, launched
from commrt.testing.processes import run_workers
from commrt.tools.commands.app import app
from commrt.tools.commands.machine import examine
from commrt.tools.measuring import doctor_environment, doctor_machine
from commrt.tools.measuring.doctor_environment import (
    AT_LEAST,
    HARMS,
    Finding,
    guarded,
    installed,
    launcher,
    packages,
    variables,
)
from commrt.tools.measuring.doctor_machine import EXCHANGE_ADVICE, gpus

ROOT = Path(__file__).parent.parent
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # nothing that is forked here computes


def only(findings):
    (finding,) = findings
    return finding


# What is installed.


GOOD = {
    "numba": "0.60.0",
    "commrt": "0.1",
    "torch": "2.14.1",
    "triton": "3.7.0",
    "cupy-cuda13x": "14.2.0",
    "nvidia-nccl-cu13": "2.30.7",
    "numpy": "2.4.6",
    "mlxtend": "0.23",
    "matplotlib": "3.9",
}


def test_what_fits_is_ok():
    found = [*packages(GOOD, "13.0")]
    assert {each.verdict for each in found} == {"ok"}
    assert "14.2.0 (cupy-cuda13x)" in {each.detail for each in found}


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ("cupy-cuda12x", "cupy-cuda13x and cupy-cuda12x"),
        ("nvidia-nccl-cu12", "nvidia-nccl-cu13 and nvidia-nccl-cu12"),
    ],
)
@pytest.mark.parametrize("cuda", ["13.0", None])
def test_packages_that_overwrite_each_other_are_named(other, names, cuda):
    finding = next(each for each in packages(GOOD | {other: "14.2.0"}, cuda) if each.name == names)
    assert (finding.verdict, "pip uninstall" in finding.advice) == ("problem", True)


def test_a_cupy_for_another_cuda_than_torchs_is_a_problem():
    finding = next(each for each in packages({"cupy-cuda12x": "14.2.0"}, "13.0") if each.name == "cupy-cuda12x")
    assert finding.verdict == "problem"
    assert finding.advice == "pip uninstall cupy-cuda12x, then pip install cupy-cuda13x."
    assert "cupy-cuda12x" not in {each.name for each in packages({"cupy-cuda12x": "14.2.0"}, None)}


OLD = [("torch", "2.5.1"), ("triton", "3.2.0"), ("numba", "0.59.1"), ("cupy-cuda12x", "13.6.0")]


@for_each(("name", "old"), OLD)
def test_a_version_that_is_too_old_is_a_problem(name, old):
    row = {"cupy-cuda12x": "cupy"}.get(name, name)
    finding = next(each for each in packages({name: old}, None) if each.name == row)
    assert finding.verdict == "problem"
    assert f">={AT_LEAST[name]}" in finding.advice


def test_what_is_not_installed_is_absent_but_torch_and_numpy_are_problems():
    verdicts = {each.name: each.verdict for each in packages({}, None)}
    assert (verdicts.pop("torch"), verdicts.pop("numpy")) == ("problem", "problem")
    assert set(verdicts.values()) == {"absent"}


def test_the_tables_say_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (*project["dependencies"], *extras["cuda12"], *extras["cuda13"], *extras["cpu"])
    asked = dict(line.split(">=") for line in lines)
    assert AT_LEAST["triton"] == TRITON_AT_LEAST
    assert {name: AT_LEAST[name] for name in asked.keys() & AT_LEAST} == {
        name: version for name, version in asked.items() if name in AT_LEAST
    }


def test_what_is_here_is_found():
    assert installed()["torch"] == metadata.version("torch")


# Variables.


def named(env, interfaces=("lo", "eth0")):
    return {finding.name: finding for finding in variables(env, interfaces)}


@for_each("name", HARMS)
def test_each_variable_of_the_table_is_found_when_it_hurts_and_not_otherwise(name):
    value = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}.get(name, "1")
    assert HARMS[name][1] in named({name: value})[name].detail
    assert name not in named({name: "0"})


def test_an_innocent_environment_has_nothing_to_say():
    env = {"PATH": "/bin", "http_proxy": "http://x", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2", "COMMRT_NVTX": "0"}
    assert named(env | {"COMMRT_TRANSPORT": "gloo", "GLOO_SOCKET_IFNAME": "eth0"}) == {}


@for_each(("value", "is_wrong"), [("eth0", False), ("eth", True), ("lo,eth9", True)])
def test_an_interface_that_is_not_there_is_a_problem(value, is_wrong):
    assert [each.verdict for each in named({"GLOO_SOCKET_IFNAME": value}).values()] == ["problem"] * is_wrong


def test_an_address_without_ranks_is_half_a_launch():
    env = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert "makes a world of one" in only(launcher(env, None)).detail
    assert only(launcher(env, None)).verdict == "warning"
    assert only(launcher(env, launch_of(2, 2))).verdict == "ok"
    assert only(launcher({}, None)).verdict == "ok"


def test_an_unknown_variable_of_ours_is_named_with_the_nearest():
    found = named({"COMMRT_TRANPORT": "gloo", "COMMRT_TIMEOUT": "3"})
    assert found["COMMRT_TRANPORT"].advice == "Did you mean COMMRT_TRANSPORT?"
    assert found["COMMRT_TIMEOUT"].advice == "Did you mean COMMRT_TIMEOUT_S?"


def test_the_known_variables_are_those_that_the_package_reads():
    paths = [path for path in (ROOT / "commrt").rglob("*.py") if "cli" not in path.relative_to(ROOT).parts]
    text = "".join(path.read_text() for path in paths)
    assert set(re.findall(r"COMMRT_[A-Z_]+", text)) == set(VARIABLES)


# GPUs, which a stand-in for torch.cuda has.


class FakeCuda:
    """Two GPUs of one kind."""

    def __init__(self, capability=(9, 0), peers=True, count=2):
        self.capability, self.peers, self.count = capability, peers, count

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def get_device_properties(self, device):
        major, minor = self.capability
        return SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30, major=major, minor=minor)

    def can_device_access_peer(self, device, peer_device):
        return self.peers


class Broken(FakeCuda):
    def get_device_properties(self, device):
        raise RuntimeError("CUDA error: out of memory")

    def can_device_access_peer(self, device, peer_device):
        raise AssertionError("Invalid peer device id")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """GPUs of which those numbered here run no kernel."""
    broken = set()

    def run_kernel(number):
        if number in broken:
            raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(doctor_machine, "run_kernel", run_kernel)
    return broken


def test_gpus_are_named_with_their_memory_and_links():
    first, second, links = gpus(FakeCuda(), "13.0")
    assert first.detail == "NVIDIA H200, 139 GiB, compute capability 9.0"
    assert (first.verdict, second.name, links.verdict) == ("ok", "gpu 1", "ok")


def test_a_gpu_that_runs_no_kernel_of_torch_is_a_problem(kernels):
    kernels.add(1)
    first, second, _ = gpus(FakeCuda(), "13.0")
    assert (first.verdict, second.verdict, "no kernel image" in second.detail) == ("ok", "problem", True)


def test_a_gpu_older_than_our_kernels_is_a_warning():
    first, *_ = gpus(FakeCuda((7, 5)), "12.8")
    assert (first.verdict, "make gpu" in first.advice) == ("warning", True)


def test_gpus_without_peer_access_are_named():
    *_, links = gpus(FakeCuda(peers=False, count=4), "13.0")
    assert links.verdict == "warning"
    assert "between GPUs 0 and 1, 0 and 2, 0 and 3, 1 and 2, 1 and 3, 2 and 3:" in links.detail


def test_a_driver_that_fails_is_a_finding_for_each_question():
    assert [each.verdict for each in gpus(Broken(), "13.0")] == ["problem"] * 3


def test_without_a_gpu_the_driver_tells_whether_one_was_expected(tmp_path):
    driver = tmp_path / "nvidiactl"
    assert only(gpus(FakeCuda(count=0), None, driver)).advice == "commrt runs on the CPU here."
    driver.touch()
    assert "built without CUDA" in only(gpus(FakeCuda(count=0), None, driver)).detail
    assert "can use no GPU" in only(gpus(FakeCuda(count=0), "13.0", driver)).detail


# The host.


def launch_of(size, local_size):
    return Launch("torchrun", 0, size, 0, local_size, "127.0.0.1", 29500)


def test_too_few_files_for_the_ranks_of_a_launch_are_a_problem(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = only(doctor_machine.files(launch_of(64, 8)))
    assert (finding.verdict, finding.advice) == ("problem", "Raise it with ulimit -n 418, in this shell.")
    assert only(doctor_machine.files(launch_of(8, 8))).verdict == "ok"


def held():
    return len([*Path("/proc/self/fd").iterdir()])


@FORKS
def test_a_rank_holds_as_many_files_as_was_counted():
    def body():
        from commrt.runtime.init import init  # noqa: PLC0415

        with init(20.0):
            return held() - inherited

    inherited = held()
    assert max(run_workers(4, body).values()) <= doctor_machine.needed_files(4)


@pytest.mark.parametrize(("text", "cpus"), [("150000 100000", 1.5), ("max 100000", 8), ("800000 50000", 8), ("", 8)])
def test_processors_are_counted_by_affinity_and_quota(text, cpus, tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(doctor_environment, "QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert doctor_environment.cpus() == cpus
    monkeypatch.setattr(doctor_environment, "QUOTA", tmp_path / "none")
    assert doctor_environment.cpus() == 8


def test_more_ranks_than_processors_are_a_warning(monkeypatch):
    monkeypatch.setattr(doctor_machine, "cpus", lambda: 4)
    assert only(doctor_machine.processors(launch_of(8, 8), 1)).verdict == "warning"
    assert "OMP_NUM_THREADS=2" in only(doctor_machine.processors(launch_of(2, 2), 4)).advice
    assert only(doctor_machine.processors(launch_of(4, 4), 1)).verdict == "ok"
    assert only(doctor_machine.processors(None, 4)).verdict == "ok"
    assert "OMP_NUM_THREADS=4" in only(doctor_machine.processors(None, 5)).advice


# The exchange.


@FORKS
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_processes_exchange_over_the_transport_that_was_chosen(transport, monkeypatch):
    variables = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    for name, value in (variables | {"COMMRT_TRANSPORT": transport}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor_machine, "LIMIT_S", 30.0)
    finding = only(doctor_machine.exchange())
    assert (finding.verdict, finding.facts["transport"]) == ("ok", transport), finding
    assert finding.facts["latency_us"] > 0
    assert launched().rank == 5


@FORKS
def test_sums_that_are_wrong_are_a_problem(monkeypatch):
    measure = doctor_machine.measure
    monkeypatch.setattr(doctor_machine, "measure", lambda schedule: measure(schedule)._replace(wrong=3))
    monkeypatch.setattr(doctor_machine, "LIMIT_S", 30.0)
    finding = only(doctor_machine.exchange())
    assert (finding.verdict, "6 elements are wrong" in finding.detail) == ("problem", True)


@FORKS
def test_an_exchange_that_hangs_ends_with_its_deadline(monkeypatch):
    def hang(_):
        os.read(os.pipe()[0], 1)  # nobody writes

    monkeypatch.setattr(doctor_machine, "measure", hang)
    monkeypatch.setattr(doctor_machine, "LIMIT_S", 0.5)
    finding = only(doctor_machine.exchange())
    assert finding.verdict == "problem"
    assert "workers [0, 1] still ran after 0.5 s" in finding.detail
    assert "COMMRT_TRANSPORT=gloo" in finding.advice


@FORKS
def test_a_failure_is_told_before_the_deadline_is():
    def fail():
        raise CommrtError("on purpose")

    with pytest.raises(CommrtError, match="on purpose"):
        run_workers(2, fail, limit_s=60.0)


# All of it.


def test_what_a_check_raises_is_a_finding():
    def check():
        yield Finding("first", "ok", "fine")
        raise ValueError("unexpected")

    first, second = guarded("second", check)
    assert first.verdict == "ok"
    assert (second.verdict, second.detail) == ("problem", "ValueError: unexpected")


def test_a_torch_that_cannot_be_imported_is_one_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("COMMRT_TRANPORT", "gloo")
    found = [*examine()]
    assert [each.name for each in found if "cannot be imported" in each.detail] == ["torch"]
    assert found[-1].name == "COMMRT_TRANPORT"
    assert "exchange" not in {each.name for each in found}


def test_doctor_ends_with_1_and_tells_all_as_json(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense9")
    result = invoke("doctor", "--quick", "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["ok"]) == (1, False)
    found = {finding["name"]: finding for finding in record["findings"]}
    assert "exchange" not in found
    assert found["GLOO_SOCKET_IFNAME"]["verdict"] == "problem"
    assert "a rank of 1 needs 40" in found["open files"]["detail"]


def test_the_table_fits_80_columns():
    env = {"COLUMNS": "80", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    output = CliRunner().invoke(app, ["doctor", "--quick"], env=env).output
    assert max(map(len, output.splitlines())) <= 80
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in output


# NCCL, of which a stand-in tells versions.


def nccl_finding(monkeypatch, runtime=23007, torchs="2.30.7", files=("/a/libnccl.so.2",)):
    binding = SimpleNamespace(get_version=lambda: runtime, get_build_version=lambda: 22707)
    monkeypatch.setattr("commrt.transport.nccl_communicator.load", lambda: binding)
    monkeypatch.setattr(doctor_machine, "_nccl_of_torch", lambda: torchs)
    monkeypatch.setattr(doctor_machine, "nccl_files", lambda: [*files])
    return only(doctor_machine.nccl())


def test_the_nccl_of_cupy_its_build_and_torch_are_told(monkeypatch):
    finding = nccl_finding(monkeypatch)
    assert (finding.verdict, finding.detail) == ("ok", "2.30.7, CuPy was built with 2.27.7, torch links 2.30.7")


@for_each(
    ("given", "verdict"),
    [
        ({"runtime": 21705, "torchs": "2.17.5"}, "problem"),
        ({"torchs": "2.28.9"}, "warning"),
        ({"files": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, "warning"),
        ({"torchs": None}, "ok"),
    ],
)
def test_an_old_nccl_or_two_of_them_are_told(given, verdict, monkeypatch):
    assert nccl_finding(monkeypatch, **given).verdict == verdict


def test_there_is_advice_for_each_transport_of_host_memory():
    assert set(EXCHANGE_ADVICE) == set(TRANSPORTS)
