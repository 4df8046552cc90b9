# SPDX-License-Identifier: Apache-2.0
"""What is shipped is whole, and works where nobody sees the checkout."""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_commands import printed

import commrt
from commrt.errors import UsageError
from commrt.runtime.torch_version import NEWEST, OLDEST, check_torch_version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEIGHBOURS = ("kernels", "algorithms")
"""What others may call a package of theirs; Hugging Face has a `kernels`."""


def run(*command, cwd, check=True):
    """As a user would, who has no variable set that leads to the checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=check)


def build(source, out, *what):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *what, source, cwd=out)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A source archive, the wheel that it makes, and the wheel of the tree; of a copy, so that the checkout stays."""
    source, out, straight = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "straight"))
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "--null", "-T", "-", "-cf", source / "tree.tar"], cwd=ROOT, input=tracked.stdout, check=True)
    subprocess.run(["tar", "-xf", "tree.tar"], cwd=source, check=True)
    build(source, out)
    build(source, straight, "--wheel")
    (sdist,), (wheel,), (other,) = out.glob("*.tar.gz"), out.glob("*.whl"), straight.glob("*.whl")
    return SimpleNamespace(source=source, sdist=sdist, wheel=wheel, straight=other)


def contents(wheel):
    """File by file."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files():
    """As the checkout has them, under the names of the wheel."""
    rooms = [ROOT / "commrt", ROOT / "commrt" / "kernels", ROOT / "commrt" / "algorithms"]  # glob follows no links
    kinds = ("*.py", "*.pyi", "*.toml", "*.json", "py.typed")
    files = {path for room in rooms for kind in kinds for path in room.rglob(kind)}
    return {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_the_wheel_is_the_package_and_nothing_else(dist):
    files = set(contents(dist.wheel))
    assert {name for name in files if ".dist-info/" not in name} == package_files()
    assert {"commrt/kernels/plain_torch.py", "commrt/algorithms/torus.py", "commrt/py.typed"} <= files
    assert {"commrt/pricing/clusters/abci.toml", "commrt/tools/planning/models/resnet50.json"} <= files
    assert f"commrt-{commrt.__version__}.dist-info/licenses/LICENSE" in files


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel_as_the_checkout(dist):
    assert contents(dist.wheel) == contents(dist.straight)


@pytest.mark.slow
def test_the_source_archive_has_what_a_reader_of_it_needs(dist):
    with tarfile.open(dist.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    files = {f"src/{name}" for name in package_files()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", *files} <= names
    assert {Path(*Path(name).parts[:2]).as_posix() for name in names if "/" in name} == {
        "src/commrt",
        "src/commrt.egg-info",
    }


@pytest.mark.slow
def test_an_editable_install_is_a_path_which_type_checkers_follow(dist, tmp_path):
    call = f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    wheel = tmp_path / run(sys.executable, "-c", call, cwd=dist.source).stdout.splitlines()[-1]
    (path,) = (text.decode().strip() for name, text in contents(wheel).items() if name.endswith(".pth"))
    assert {each.parent.name for each in Path(path).glob("*/__init__.py*")} == {"commrt"}


@pytest.mark.slow
def test_the_metadata_says_what_pyproject_says(dist):
    files = contents(dist.wheel)
    (said,) = (email.message_from_bytes(files[name]) for name in files if name.endswith(".dist-info/METADATA"))
    (entry,) = (files[name].decode() for name in files if name.endswith(".dist-info/entry_points.txt"))
    assert (said["Name"], said["Version"]) == ("commrt", commrt.__version__)
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert said.get_all("Provides-Extra") == list(PROJECT["optional-dependencies"])
    assert [need for need in said.get_all("Requires-Dist") if "extra ==" not in need] == PROJECT["dependencies"]
    assert said["License-Expression"] == "Apache-2.0"
    assert "commrt = commrt.__main__:main" in entry


@pytest.fixture(scope="module")
def environment(dist, tmp_path_factory):
    """The wheel installed in an environment that has its dependencies and does not see the checkout.

    The packages of this Python (torch and all) are put behind those of a fresh environment. The line that does this
    adds a folder, and what an editable install leaves in that folder works only in one that Python itself calls its
    site-packages: so commrt is there only as it was installed from the wheel. Beside it lie packages of others.
    """
    home = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    (site,) = (home / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-compile", "--quiet"]
    run(*pip, "--no-deps", "--force-reinstall", dist.wheel, cwd=home)
    for name in NEIGHBOURS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'somebody else'\n")
    return SimpleNamespace(home=home, site=site, python=python, commrt=python.with_name("commrt"))


@pytest.mark.slow
def test_beside_packages_called_kernels_and_algorithms_each_finds_its_own(environment):
    own = ["commrt/__init__.py", "commrt/kernels/plain_torch.py", "commrt/algorithms/torus.py"]
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in own]
    call = (
        "import json, kernels, algorithms; from importlib.util import find_spec; "
        f"print(json.dumps([kernels.OWNER, algorithms.OWNER, *(find_spec(name).origin for name in {modules})]))"
    )
    found = json.loads(run(environment.python, "-c", call, cwd=environment.home).stdout)
    assert found == ["somebody else", "somebody else", *(str(environment.site / path) for path in own)]


def told(environment, *args):
    """What the installed command prints as JSON."""
    return json.loads(run(environment.commrt, *args, "--json", cwd=environment.home).stdout)


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_trains_with_two_workers_and_the_installed_package(environment):
    program = ROOT / "examples" / "mnist" / "train.py"
    options = ["--workers", "2", "--epochs", "1", "--batch-size", "500", "--json"]
    record = json.loads(run(environment.python, program, *options, cwd=environment.home).stdout)
    assert (record["workers"], record["steps"], record["replicas_equal"]) == (2, 8, True)


@pytest.mark.slow
def test_the_installed_command_proves_a_schedule_and_finds_itself_whole(environment):
    assert told(environment, "verify", "torus2d")["ok"]
    record = told(environment, "doctor")
    assert record["ok"]
    assert {each["name"]: each["detail"] for each in record["findings"]}["commrt"] == commrt.__version__


PROGRAM = """\
import torch

import commrt
from commrt.tools.planning.workload import MODELS

world = commrt.init(timeout_s=30.0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica: commrt.Replica = commrt.attach(model, optimizer, commrt.Torus2D())
ranks: int = world.size
error: str = world.size
"""
STRICT = """\
[mypy]
strict = true
[mypy-torch.*,numpy.*,triton.*,cupy.*,rich.*,typer.*]
follow_imports = skip
"""
"""Of others' packages no types are needed; reading torch takes half a minute."""


@pytest.mark.slow
def test_mypy_finds_the_types_of_the_installed_package(environment):
    (environment.home / "program.py").write_text(PROGRAM)
    (environment.home / "strict.ini").write_text(STRICT)
    options = ["--python-executable", environment.python, "--config-file", "strict.ini", "--cache-dir", "mypy"]
    checked = run(sys.executable, "-m", "mypy", *options, "program.py", cwd=environment.home, check=False)
    wrong = 'Incompatible types in assignment (expression has type "int", variable has type "str")  [assignment]'
    assert re.findall(r"^(\S+) error: (.*)$", checked.stdout, re.MULTILINE) == [("program.py:11:", wrong)], (
        checked.stdout
    )


# torch finds an installed commrt, and ``import commrt.c10d`` is enough for others; ``import commrt`` imports no torch.

OPEN = """
import torch.distributed as dist
dist.init_process_group("commrt", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(tensor := torch.ones(3))
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


def said(program, **environment):
    return printed(sys.executable, "-c", program, **environment).strip()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "imports",
    [
        "import commrt, torch",
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import commrt.c10d, torch",
        "import commrt, torch, commrt.c10d, importlib; importlib.reload(commrt.c10d)",
        "import torch._dynamo, commrt.c10d; commrt.c10d.register()",
    ],
)
def test_a_group_is_opened_whatever_was_imported_first(imports):
    assert said(imports + OPEN) == "commrt [1.0, 1.0, 1.0]"


@pytest.mark.processes
def test_importing_commrt_is_light():
    heavy = {"torch", "triton", "cupy", "numpy", "typer"}
    assert said(f"import sys, commrt; print({heavy} & set(sys.modules))") == "set()"


def test_the_command_says_what_to_install_for_it():
    call = "import sys; sys.modules['typer'] = None; from commrt.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    line = "commrt: the command needs typer: pip install 'commrt[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


# What is said of versions of torch that commrt was not tested with.


def test_a_torch_that_is_too_old_is_refused_with_the_version_to_install():
    with pytest.raises(UsageError, match=f"torch 2.6.0 is too old for commrt: install torch {OLDEST} or later"):
        check_torch_version("2.6.0")


def test_a_torch_that_is_newer_than_the_tested_ones_is_named_once(caplog):
    for _ in range(2):
        check_torch_version("2.99.0.dev20270101+cu130")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "torch 2.99.0.dev20270101+cu130 is newer than" in line


@pytest.mark.parametrize("version", [f"{OLDEST}.0", f"{NEWEST}.9+cpu", "2.10.0a0"])
def test_nothing_is_said_of_a_tested_torch(caplog, version):
    check_torch_version(version)
    assert not caplog.records


def test_the_oldest_torch_is_that_of_pyproject_and_of_the_readme():
    assert f"torch>={OLDEST}" in PROJECT["dependencies"]
    assert f"torch {OLDEST} or later" in (ROOT / "README.md").read_text("utf-8")
