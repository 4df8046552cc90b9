# SPDX-License-Identifier: Apache-2.0
"""Which mutants of the product do the tests notice? ``python dev/mutants.py reach FOLDER``, then
``run FOLDER``.

`sample` draws the mutants. `reach` runs the tests once on a copy that notes which test enters which
mutated function, in its processes too, and how long each test takes. `run` changes one function at
a time, in copies of the tree, and runs the tests that enter it, the quickest ones first, until one
fails or the time is up. FOLDER holds mutants.json, reach.tsv, tests.json and results.json; what it
holds already is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from shutil import copytree, ignore_patterns
from signal import SIGKILL
from time import monotonic
from typing import Any

from mutant import ROOMS, Mutant, applied, first_line, sample

ROOT = Path(__file__).parent.parent
IGNORED = ignore_patterns(
    ".git", ".venv", "build", "dist", ".*_cache", "__pycache__", ".hypothesis", ".benchmarks"
)
NOT_OF_MUTANTS = ("tests/test_architecture.py", "tests/test_packaging.py")
"""Tests that read the source, or build it, and so fail or pass for other reasons."""
REACH = '''"""Notes which test enters which mutated function."""
import os
seen = set()
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open({path!r}, "a") as file:
            file.write(f"{{number}}\\t{{test}}\\n")
'''
NOTHING_FAILED = (0, 4, 5)
"""Exit codes of pytest: all passed, a name that it does not know, no test."""
QUICK_TESTS = 60
"""So many tests, of different functions, are run first: they notice most mutants within seconds."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["sample", "reach", "run", "table"])
    parser.add_argument("folder", type=Path, help="where the results are kept")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose tests run")
    parser.add_argument("--count", type=int, default=120, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=52, help="which mutants to draw")
    parser.add_argument("--only", default="", help="tests of this marker expression")
    parser.add_argument(
        "--at-once", type=int, default=2, help="how many mutants are tried at the same time"
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="seconds for the tests of one mutant"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    {"sample": draw, "reach": reach, "run": run, "table": table}[options.command](options)


def draw(options: argparse.Namespace) -> None:
    """Draw the mutants and write mutants.json."""
    mutants = sample(options.tree, options.count, options.seed)
    write(options.folder / "mutants.json", [mutant.as_dict() for mutant in mutants])


def mutants_of(folder: Path) -> list[Mutant]:
    """Return the mutants in mutants.json."""
    return [Mutant(**one) for one in read(folder / "mutants.json")]


def reach(options: argparse.Namespace) -> None:
    """Run the tests on a copy that notes which test enters which mutated function."""
    notes = options.folder.resolve() / "reach.tsv"
    notes.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        tree = copy(options.tree, Path(parent, "tree"))
        (tree / "commrt/_reach.py").write_text(REACH.format(path=str(notes)))
        insert_notes(tree, mutants_of(options.folder))
        marked = ["-m", options.only] if options.only else []
        durations = options.folder.resolve() / "tests.json"
        pytest(
            tree,
            ["-n", "3", "--dist", "worksteal", *marked, "-p", "durations"],
            {"TEST_DURATIONS": str(durations)},
        )


def insert_notes(tree: Path, mutants: list[Mutant]) -> None:
    """Let each mutated function in `tree` note who enters it."""
    places = defaultdict[str, list[tuple[int, int, int]]](list)
    for number, mutant in enumerate(mutants):
        with suppress(LookupError):  # the function is gone, which `run` says
            places[mutant.file].append((*first_line(mutant, tree), number))
    for file, of_file in places.items():
        lines = (tree / file).read_text("utf-8").splitlines()
        for line, column, number in sorted(of_file, reverse=True):
            lines.insert(
                line - 1, f"{' ' * column}__import__('commrt._reach')._reach.hit({number})"
            )
        (tree / file).write_text("\n".join(lines) + "\n", "utf-8")


def run(options: argparse.Namespace) -> None:
    """Try each mutant that has no result yet, a few at the same time."""
    mutants = mutants_of(options.folder)
    results = known(options.folder)
    reached = tests_of(options.folder, read(options.folder / "tests.json"))
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(options.at_once) as pool:
        trees = SimpleQueue[Path]()
        for number in range(options.at_once):
            trees.put(copy(options.tree, Path(parent, str(number), "tree")))

        def attempt(number: int) -> None:
            tree = trees.get()
            results[str(number)] = tried(tree, mutants[number], reached[number], options)
            trees.put(tree)
            print(
                number,
                mutants[number].room,
                mutants[number].function,
                results[str(number)],
                flush=True,
            )
            write(
                options.folder / "results.json",
                dict(sorted(results.copy().items(), key=lambda one: int(one[0]))),
            )

        list(
            pool.map(
                attempt, [number for number in range(len(mutants)) if str(number) not in results]
            )
        )
    table(options)


def known(folder: Path) -> dict[str, Any]:
    """Return the results that were written before."""
    return dict(read(folder / "results.json")) if (folder / "results.json").exists() else {}


def tests_of(folder: Path, tests: dict[str, dict[str, Any]]) -> dict[int, list[str]]:
    """Return the tests to run for each mutant: first the quickest of each function, then the
    others.
    """
    reached = defaultdict[int, set[str]](set)
    for line in (folder / "reach.tsv").read_text("utf-8").splitlines():
        number, _, test = line.partition("\t")
        if tests.get(test, {}).get("outcome") == "passed" and not test.startswith(NOT_OF_MUTANTS):
            reached[int(number)].add(test)
    return defaultdict(list, {number: ordered(found, tests) for number, found in reached.items()})


def ordered(names: set[str], tests: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names, quickest first, with one test of each function before the second one of
    any.
    """
    rank = Counter[str]()
    keyed = []
    for name in sorted(names, key=lambda name: float(tests[name]["wall_s"])):
        function = name.partition("[")[0]
        keyed.append((rank[function], float(tests[name]["wall_s"]), name))
        rank[function] += 1
    return [name for _, _, name in sorted(keyed)]


def tried(
    tree: Path, mutant: Mutant, tests: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return what the tests say of the mutant: noticed, and by which; survived; or not reached by
    any.
    """
    path = tree / mutant.file
    begin_s = monotonic()
    try:
        changed = applied(mutant, tree)
    except LookupError as problem:
        return {"outcome": "gone", "why": str(problem)}
    if not tests:
        return {"outcome": "not reached"}
    before = path.read_text("utf-8")
    try:
        path.write_text(changed, "utf-8")
        for part in (tests[:QUICK_TESTS], tests[QUICK_TESTS:]):
            left_s = options.limit_s - (monotonic() - begin_s)
            if part and (by := noticed(tree, part, left_s, options.only)):
                return {"outcome": "noticed", "by": by, "wall_s": round(monotonic() - begin_s, 1)}
        return {
            "outcome": "survived",
            "tests": len(tests),
            "wall_s": round(monotonic() - begin_s, 1),
        }
    finally:
        path.write_text(before, "utf-8")


def noticed(tree: Path, tests: list[str], limit_s: float, only: str) -> str:
    """Run the tests until one fails or the time is up, and return its name;
    empty if none failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")
        found = Path(folder, "tests.json")
        names.write_text("\n".join(tests), "utf-8")
        words = ["-x", "--timeout", "60", "-p", "durations", "-m", only, f"@{names}"]
        try:
            code = pytest(tree, words, {"TEST_DURATIONS": str(found)}, limit_s)
        except subprocess.TimeoutExpired:  # a test that hangs fails by its own timeout
            return ""
        outcomes = read(found) if found.exists() else {}
        failed = [name for name, of_test in outcomes.items() if of_test["outcome"] == "failed"]
        if failed:
            return str(failed[0])
        return "" if code in NOTHING_FAILED else f"pytest ended with {code}"


def pytest(
    tree: Path, words: list[str], extra: dict[str, str], limit_s: float | None = None
) -> int:
    """Run pytest in `tree`, and return its exit code."""
    paths = os.pathsep.join(
        map(str, (tree, tree / "tests/support", ROOT / "dev", ROOT / "tests/support"))
    )
    environment = (
        os.environ
        | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        | extra
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        command, cwd=tree, env=environment, start_new_session=True, **quiet
    ) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, SIGKILL)  # with the ranks that the tests started
            raise


def table(options: argparse.Namespace) -> None:
    """Print how many mutants of each room were noticed, and those that were not."""
    mutants = mutants_of(options.folder)
    results = known(options.folder)
    for room in ROOMS:
        outcomes = Counter(
            one["outcome"] for number, one in results.items() if mutants[int(number)].room == room
        )
        print(
            f"{room:20}",
            ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
        )
    for number, one in results.items():
        if one["outcome"] != "noticed":
            mutant = mutants[int(number)]
            print(
                f"{number:>4} {one['outcome']:12} {mutant.file} {mutant.function}: {mutant.before}"
                f" -> {mutant.after}"
            )


def copy(tree: Path, to: Path) -> Path:
    """Copy the files of `tree`, but for what is made from them."""
    return Path(copytree(tree, to, symlinks=True, ignore=IGNORED))


def read(path: Path) -> Any:
    """Return the JSON in `path`."""
    return json.loads(path.read_text("utf-8"))


def write(path: Path, value: object) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
