# SPDX-License-Identifier: Apache-2.0
"""Pages as blocks of code, and what runs them; tests/test_docs.py asks for it.

How a page says what it needs, in a comment right before a block:

- ``<!-- with: a model and data -->`` gives the block names that the page takes for granted; see `given`.
- ``<!-- raises: ScheduleError -->``: the block must end in that error.
- ``<!-- printed -->`` before a ``text`` block: the block before printed this (white space aside; ``...`` stands for
  anything).
- ``<!-- not run: REASON -->``: only compiled, or only looked at.

``<!-- ranks: 3 -->`` anywhere in a page: its Python runs in so many processes, as under torchrun; what the first prints
counts. Blocks of a page share their names, in order; pages share nothing. Its ranks and its commands share a folder.
"""

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / folder / "README.md" for folder in (".", "kernels", "bench", "dev")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "FINDINGS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "mnist" / "README.md",
    *sorted((ROOT / "studies").rglob("*.md")),
]
NOTES = ("with", "raises", "printed", "not run", "ranks")
LANGUAGES = ("python", "sh", "toml", "text")
LIMIT_S = 100.0
DEMO = "examples/mnist/train.py"
YOURS = {"train.py"}
"""Files that stand for the reader's own."""

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+)(?P<language>\S*)(?P<rest>.*)$")
COMMENT = re.compile(r"^\s*<!-- (?P<word>[a-z ]+?)(?:: (?P<what>.*?))? -->$")
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    """Of its first line of code, counted from 1."""
    language: str
    body: str
    notes: tuple[tuple[str, str], ...]
    """What the comments before it say: (word, what)."""

    @property
    def place(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def note(self, word):
        """What a comment says, "" if it says no more than the word, None if there is none."""
        return dict(self.notes).get(word)

    @property
    def is_executed(self):
        if self.language == "text":
            return self.note("printed") is not None
        return self.note("not run") is None


def blocks(page):
    """All fenced blocks of `page`; raises `ValueError` for what would escape."""
    lines, found, number = page.read_text().split("\n"), [], 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != fence["ticks"]:
            end += 1
        body = "\n".join(line.removeprefix(fence["indent"]) for line in lines[number + 1 : end]) + "\n"
        block = Block(page, number + 2, fence["language"], body, tuple(_notes_above(lines, number)))
        _require_known(block, fence["ticks"], fence["rest"])
        found.append(block)
        number = end + 1
    return found


def _notes_above(lines, number):
    while number > 0 and (comment := COMMENT.match(lines[number - 1])):
        yield comment["word"], comment["what"] or ""
        number -= 1


def _require_known(block, ticks, rest):
    if ticks != "```" or rest.strip() or block.language not in LANGUAGES:
        raise ValueError(f"{block.place}: a block of {ticks}{block.language}{rest}: use ``` and one of {LANGUAGES}")
    if strange := [word for word, _ in block.notes if word not in NOTES]:
        raise ValueError(f"{block.place}: a comment says {strange[0]!r}: known are {NOTES}")
    if block.note("not run") == "":
        raise ValueError(f"{block.place}: not run, and no reason is stated")


def ranks(page):
    """How many processes run the Python of `page`."""
    stated = RANKS.search(page.read_text())
    return int(stated[1]) if stated else 1


# What pages take for granted ----------------------------------------------------------------------------------------


def _model_and_data():
    """A small network, its optimizer, and 64 samples in batches of 8."""
    import torch  # noqa: PLC0415  # the process that runs pages has it
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    loader = DataLoader(data, batch_size=8)
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 30),
        "loss_fn": torch.nn.functional.cross_entropy,
        "data": data,
        "loader": loader,
        "batches": cycle(loader),
    }


def given(what):
    names = _model_and_data()
    if what == "a model and data, attached":
        import commrt  # noqa: PLC0415

        world = commrt.init()
        replica = commrt.attach(names["model"], names["optimizer"])
        names |= {"commrt": commrt, "world": world, "replica": replica}
    return names


def run_python(tell, name, folder):
    """In a process of its own, as each rank: the Python blocks of a page; (line, what it printed) for each."""
    import torch  # noqa: PLC0415  # the process that runs pages has it

    torch.set_num_threads(1)  # several ranks share the cores
    page = Path(name)
    module = sys.modules["page"] = ModuleType("page")
    os.chdir(folder)
    try:
        return [
            (block.line, _run_block(block, module.__dict__))
            for block in blocks(page)
            if block.language == "python" and block.is_executed
        ]
    finally:
        os.chdir(ROOT)
        _end_world()


def _end_world():
    """As the end of a program would; a process that was forked ends without that."""
    from commrt.runtime import init  # noqa: PLC0415

    if init._current is not None:
        init._current.close()


def _run_block(block, names):
    if (what := block.note("with")) is not None:
        names.update(given(what))
    code = compile("\n" * (block.line - 1) + block.body, str(block.page), "exec")
    expected = block.note("raises")
    said = io.StringIO()
    with redirect_stdout(said), patch.dict(os.environ):  # Lightning takes a launcher's variables away at its end
        try:
            exec(code, names)  # noqa: S102  # that is the point
        except Exception as error:
            if type(error).__name__ != expected:
                raise RuntimeError(f"{_where(block, error)}: {type(error).__name__}: {error}") from error
            return f"{type(error).__name__}: {error}"
    if expected is not None:
        raise RuntimeError(f"{block.place}: no {expected} was raised")
    return said.getvalue()


def _where(block, error):
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(block.page)]
    return f"{block.page.relative_to(ROOT)}:{lines[-1] if lines else block.line}"


def run_commands(page, folder):
    """(line, what they printed) for each block of commands of `page`, run in `folder`, which it makes the current one.

    There are links to `examples` and `studies`, whose files pages name.
    """
    os.chdir(folder)
    for inside in ("examples", "studies"):
        Path(inside).symlink_to(ROOT / inside)
    return [
        (block.line, "".join(_run_lines(block)))
        for block in blocks(page)
        if block.language == "sh" and block.is_executed
    ]


def _run_lines(block):
    for offset, line in enumerate(block.body.replace("\\\n", "").split("\n")):
        for words in commands(line):
            try:
                yield run_command(words)
            except Exception as error:
                raise RuntimeError(f"{block.page.relative_to(ROOT)}:{block.line + offset}: {line}: {error}") from error


def commands(line):
    """The commands of a line, each as its words, without variables and sudo."""
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        while command and (re.fullmatch(r"[A-Z_]+=.*", command[0]) or command[0] == "sudo"):
            command = command[1:]
        yield command


FILES_ARE_LOOKED_UP = {
    *("python", "python3", "torchrun", "mpirun", "mpiexec", "srun", "nsys", "ncu", ".venv/bin/pytest", "pytest"),
}
"""Commands that are not run: only what they name must exist, and the demo and `commrt` must take their options."""


def run_command(words):
    """What it printed. Only `commrt` and studies are run: the demo has tests of its own."""
    first, *rest = words
    if first == "commrt":
        return _run_commrt(rest)
    if first == "python" and rest[0].startswith("studies/"):
        return _run_study(rest)
    if first == "make":
        _require_all([word for word in rest if "=" not in word], _targets(), "no target of the Makefile")
    elif first == "pip":
        _require_extras(rest)
    elif first in FILES_ARE_LOOKED_UP:
        _require_files(rest)
        for program in {"commrt", DEMO} & {*rest}:
            parsed(program, rest[rest.index(program) + 1 :])
    elif first not in {"git", "cd"}:
        raise ValueError(f"{first!r} is no command that is known here: teach it, or write `text`")
    return ""


def _run_commrt(words):
    from commands import invoke  # noqa: PLC0415  # ranks that run Python need none of it

    result = invoke("", *words)
    if result.exit_code:
        raise ValueError(f"exit code {result.exit_code}: {result.output} {result.exception or ''}")
    return result.stdout


def _run_study(words):
    finds_its_folder = {**os.environ, "PYTHONSAFEPATH": "", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=finds_its_folder
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def parsed(program, words, *, whole=True):
    """Raise if `commrt` or the demo does not take these words; unless `whole`, arguments and values may be missing."""
    from commands import app, built  # noqa: PLC0415  # as above
    from train import app as demo  # noqa: PLC0415  # of examples/mnist

    command, name, rest = built(app if program == "commrt" else demo), program, list(words)
    if not words:
        return
    while hasattr(command, "commands"):  # of commrt, and of its groups
        if not rest:
            return
        name, command, rest = command.resolve_command(command.make_context(name, [*rest]), rest)
    try:
        command.make_context(name, rest)
    except Exception as error:
        if whole or type(error).__name__ not in {"MissingParameter", "BadOptionUsage"}:
            raise


def _targets():
    made = (ROOT / "Makefile").read_text()
    return {name for line in re.findall(r"^([a-z][\w -]*):(?!=)", made, re.MULTILINE) for name in line.split()}


def _require_extras(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if asked := re.fullmatch(r"(?:\.|commrt)\[(.*)\]", word):
            _require_all(asked[1].split(","), extras, "no extra of pyproject.toml")


def _require_files(words):
    ours = re.compile(r"(bench|dev|tests|examples|studies|docs)/[\w./:]+")
    files = [word.partition("::")[0] for word in words if ours.fullmatch(word)]
    files += [word for word in words if re.fullmatch(r"[\w]+\.py", word) and word not in YOURS]
    _require_all(files, {name for name in files if (ROOT / name).exists()}, "no file here")


def _require_all(names, known, complaint):
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"{missing[0]!r} is {complaint}")


def is_like(shown, printed):
    """True if `printed` is what is `shown`, white space aside, where ``...`` stands for anything."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    return re.fullmatch(r" ?.*? ?".join(parts), " ".join(printed.split())) is not None
