# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a linter cannot say."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import host_calls
import pytest
from sources import ROOT, assert_none, modules, offences, sources

import commrt
from commrt import importing
from commrt.algorithms.catalogue import ALGORITHMS

STUBS = [path for folder in ("commrt", "algorithms") for path in (ROOT / folder).rglob("__init__.pyi")]
KERNELS = [path.stem for path in (ROOT / "kernels").glob("*.py") if path.stem != "__init__"]


def test_the_rooms_outside_are_linked_into_the_package_and_it_into_what_is_installed():
    for link in ("commrt/kernels", "commrt/algorithms", "src/commrt"):
        assert (ROOT / link).readlink() == Path("..") / Path(link).name


def test_the_public_surface_is_sorted_and_exists():
    assert commrt.__all__ == sorted(set(commrt.__all__))
    for name in commrt.__all__:
        assert getattr(commrt, name) is not None
    assert set(commrt.__all__) <= set(dir(commrt))
    exec("from commrt import *", taken := {})  # noqa: S102
    assert set(commrt.__all__) == taken.keys() - {"__builtins__"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = commrt.nonsense


def test_every_stub_names_what_is_there_and_stands_in_its_own_room_or_below():
    offers = {path.parent: importing.homes(imported(path).__name__) for path in STUBS}
    assert len(offers) == 11
    for folder, homes in offers.items():
        package = imported(folder / "__init__.py")
        assert homes
        assert_none(f"{folder.name}.{name}" for name in homes if getattr(package, name, None) is None)
        below = [home.split(".")[1] for home in homes.values() if home != "commrt" and folder.name != "commrt"]
        assert_none(f"{folder.name} offers {room}" for room in below if FLOORS[room] < FLOORS[folder.name])


PLUGS = {
    "commrt.algorithms.catalogue", "commrt.algorithms.gossip", "commrt.quantizer", "commrt.algorithm",
    "commrt.local_sgd.policy", "commrt.backup_workers.policy", "commrt.quantization.adaptive_bits",
}  # fmt: skip
"""They say what trains with an algorithm, carries a wire or has a name, though that stands above them."""


def named_above(source):
    parts = source.path.relative_to(ROOT).with_suffix("").parts
    own = (parts if parts[0] == "commrt" else ("commrt", *parts))[1:]
    for node in source.all(ast.Constant):
        home = re.fullmatch(r"commrt\.(\w+)(?:\.(\w+))?[\w.:]*", str(node.value))
        if not home or ".".join(("commrt", *own)) in PLUGS:
            continue
        if home[1] != own[0]:
            is_above = FLOORS.get(home[1], 0) <= FLOORS.get(own[0], 0)
        else:
            is_above = (
                home[2] != own[1]
                and home[2] in (floors := FLOORS_IN.get(own[0], {}))
                and floors[home[2]] <= floors[own[1]]
            )
        if is_above:
            yield node.value


def test_a_module_named_in_a_string_stands_below_or_is_a_plug():
    assert_none(offences(named_above, modules()))


def test_every_module_has_a_licence():
    unlicensed = [each for each in modules() if not each.text.startswith("# SPDX-License-Identifier: Apache-2.0\n")]
    assert_none(each.name for each in unlicensed if each.path.name != "__init__.py")


def test_only_one_module_and_the_doctor_read_the_environment():
    free = {"environment.py", "machine.py", "doctor_environment.py", "processes.py"}
    assert_none(each.name for each in modules() if "os.environ" in each.text and each.path.name not in free)


def imported(path):
    """The module of a file, under the name by which users import it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return import_module(".".join(parts if parts[0] == "commrt" else ("commrt", *parts)).removesuffix(".__init__"))


def contracts():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def floors(contract):
    return {name: floor for floor, names in enumerate(contract["layers"]) for name in names.split(" | ")}


LAYERS = next(each["layers"] for each in contracts() if each["name"] == "Rooms import downwards only")
FLOORS = floors({"layers": LAYERS})
FLOORS_IN = {
    each["containers"][0].removeprefix("commrt."): floors(each)
    for each in contracts()
    if each["type"] == "layers" and each["name"].startswith("So do")
}
"""By room, the floor of each of its modules."""
"""How far from the top each room stands."""


def test_every_room_has_a_row_on_the_map():
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/?` \|", page[page.index("## Rooms") : page.index("## The walk")], re.MULTILINE)
    inside = {path.stem for path in (ROOT / "commrt").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert sorted(rows) == sorted(name for name in inside if not name.startswith("__"))


def programs():
    """Return the modules that tests import by their bare names, each with its folders: helpers, examples, studies."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = defaultdict(list)
    for folder in settings["pythonpath"]:
        for path in (ROOT / folder).glob("*.py"):
            folders[path.stem].append(folder)
    return folders


def test_modules_that_are_imported_by_their_bare_names_have_names_of_their_own():
    shared = {"__init__", "conftest"}
    assert_none(f"{name}: {places}" for name, places in programs().items() if len(places) > 1 and name not in shared)


def test_every_algorithm_and_kernel_has_a_line_in_the_documentation():
    algorithms, kernels = (ROOT / "docs/algorithms.md").read_text(), (ROOT / "kernels/README.md").read_text()
    assert_none(name for name in ALGORITHMS if f"`{name}`" not in algorithms)
    assert_none(name for name in KERNELS if f"`{name}`" not in kernels)


def test_every_decision_is_listed():
    page = (ROOT / "docs/decisions/index.md").read_text()
    assert_none(record.name for record in (ROOT / "docs/decisions").glob("0*.md") if record.name not in page)


UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
ALLOWED = {
    "commrt/training/stateful.py": "the names of what torch.save and torch.load raise",
    "commrt/training/packed_state.py": "the name of what torch.load raises",
    "commrt/backup_workers/catch_up.py": "the name of what torch.load raises",
}
PIPES = {"commrt/testing/processes.py": "pipes between a process and the ranks that it has started"}


def unpickling(source):
    """What in a module turns bytes into objects that may run code."""
    for node in source.all(ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLES:
            yield from (alias.name for alias in node.names if not alias.name.endswith("Error"))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called == "torch.load" and words.get("weights_only") != "True":
                yield "torch.load without weights_only=True"
            if "_object" in called.rpartition(".")[2] and called.startswith(("dist.", "torch.distributed.")):
                yield called


def test_nothing_is_unpickled():
    assert_none(offences(unpickling, [*modules(), *sources("examples")]))


@pytest.mark.parametrize(("text", "allowed"), [("pickle import", ALLOWED), ("multiprocessing.connection", PIPES)])
def test_only_few_modules_name_what_unpickles(text, allowed):
    found = [*modules(), *sources("examples")]
    assert_none(each.name for each in found if text in each.text and each.name not in allowed)


JOB = """
import sys, torch, commrt
world, model = commrt.init(), torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
commrt.attach(model, optimizer, commrt.Ring(), world=world)
for _ in range(10):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
print(*(name.removeprefix("commrt.") for name in sys.modules if name.startswith("commrt.")))
"""


@pytest.mark.slow  # it starts a process that imports torch
def test_a_synchronous_training_job_imports_no_tools_and_no_options():
    # torch itself imports the root of `c10d` where commrt is installed, to know its name
    alone = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", JOB], env=alone, capture_output=True, text=True, timeout=100, check=True
    )
    modules = set(done.stdout.split())
    rooms = {name.split(".")[0] for name in modules}
    assert {"training", "buckets", "runtime"} <= rooms
    options = {"backup_workers", "c10d", "elastic", "gossip", "local_sgd", "pricing", "quantization", "quantizer"}
    assert rooms & {"tools", "testing", *options} == set()


def test_the_stations_of_a_gradient_on_the_page_are_there():
    page = (ROOT / "docs/architecture.md").read_text()
    walk = page[page.index("## The walk of a gradient") : page.index("## Add an algorithm")]
    stations = re.findall(r"^\d\. `([\w/]+)`", walk, re.MULTILINE)
    assert len(stations) == 7
    assert_none(each for each in stations if not [*ROOT.glob(f"**/{each}*")])


@pytest.mark.parametrize("what", host_calls.WORK)
def test_no_exchange_makes_more_calls_than_the_page_says(what):
    """After a change that saves some, put the rows that ``python tests/support/host_calls.py`` prints on the page."""
    most = host_calls.written()[what]
    assert host_calls.least_calls(what, enough=most) <= most
