# SPDX-License-Identifier: Apache-2.0
"""Run commands in processes of their own, most forked from one that has imported torch: they cost what they do."""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess, run
from tempfile import TemporaryDirectory

from commrt.testing import processes

LIMIT_S = 110
COMMRT = "commrt.tools.commands.app"


@dataclass(frozen=True)
class Started:
    """A command that runs in a session of its own, so that a signal to its group reaches nothing else."""

    process: BaseProcess
    folder: Path

    @property
    def pid(self):
        return self.process.pid

    def ended(self):
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, f"no end within {LIMIT_S} s"
        out, err = (self.folder.joinpath(name).read_text() for name in ("out", "err"))
        return CompletedProcess("commrt", self.process.exitcode, out, err)


def _main(args, environment, folder, program):
    """Be the command in this new process."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["commrt", *args]
    from commrt.tools.commands.app import main  # noqa: PLC0415  # the test's own process needs none of it

    main(import_module(program).app)


@contextmanager
def started(*args, env=None, program=COMMRT):
    """Start the command, the `app` of module `program`; it does not outlive the block."""
    with TemporaryDirectory() as folder:
        given = [str(arg) for arg in args], dict(os.environ if env is None else env), Path(folder), program
        context = get_context("forkserver")
        context.set_forkserver_preload(processes.IMPORTED)
        process = context.Process(target=_main, args=given)
        process.start()
        try:
            yield Started(process, Path(folder))
        finally:
            process.kill()
            process.join()


def command(*args, env=None, program=COMMRT):
    with started(*args, env=env, program=program) as one:
        return one.ended()


def printed(*command, **variables):
    """Return what a program prints that is started anew, with `variables` besides those of this process."""
    words, environment = [str(word) for word in command], os.environ | variables
    done = run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
