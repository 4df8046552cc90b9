# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for `python` and `torchrun` that cost no import of torch: tests of launchers use them.

Each asks a server, which has imported torch and more, to fork a process with its arguments, folder,
variables, files and namespaces, and ends as that ends, by the same signal or exit code. If a
stand-in is killed, so is the process. What a script imports besides, and all that it does, is its
own. `torchrun` starts the `python` beside it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from commrt.testing.processes import IMPORTED

MORE = ["torch.distributed.checkpoint.state_dict", "torch.distributed.run", "commrt.backup_workers"]
PROGRAMS = {"python": [], "torchrun": [str(Path(sys.executable).with_name("torchrun"))]}
"""Stand-ins, and what they put before their arguments."""
SPACES = ["user", "net"]
"""Kinds of namespaces, in the order in which they are entered."""
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    variables = os.environ | {{"PYTHON_EXEC": {python_exec!r}}}
    given = json.dumps([[*{before!r}, *sys.argv[1:]], os.getcwd(), dict(variables)]).encode()
    spaces = [os.open(f"/proc/self/ns/{{name}}", os.O_RDONLY) for name in {spaces!r}]
    socket.send_fds(server, [len(given).to_bytes(4, "big")], [0, 1, 2, *spaces])
    server.sendall(given)
    code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def forked_python() -> Iterator[Path]:
    """Yield a folder for the PATH that has the stand-ins; a server runs meanwhile."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/server"
        listener.bind(address)
        listener.listen(64)
        for name, before in PROGRAMS.items():
            file = Path(folder, name)
            text = CLIENT.format(
                python=sys.executable,
                address=address,
                python_exec=f"{folder}/python",
                before=before,
                spaces=SPACES,
            )
            file.write_text(text)
            file.chmod(0o755)
        server = context.Process(target=serve, args=(listener,))
        server.start()
        try:
            yield Path(folder)
        finally:
            server.terminate()
            server.join()


def serve(listener: socket.socket) -> None:
    """Fork a process for each stand-in, until this one is terminated."""
    for name in MORE:
        import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection)
        connection.close()
        with suppress(ChildProcessError):  # so that their seconds count as ours
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _attend(connection: socket.socket) -> None:
    """Fork the process, and tell the stand-in how it ended, or end it if the stand-in has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 4, 3 + len(SPACES))
    words, folder, variables = json.loads(
        connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    )
    if (pid := os.fork()) == 0:
        connection.close()
        for name, space in zip(SPACES, files[3:], strict=True):
            if not os.path.samestat(os.fstat(space), Path("/proc/self/ns", name).stat()):
                _enter(space)
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # as of a new process
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        os._exit(_exit_code(words))
    for file in files:
        os.close(file)
    process = os.pidfd_open(pid)
    ready, _, _ = select.select([process, connection], [], [])
    if process not in ready:
        os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _enter(space: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _exit_code(words: Sequence[str]) -> int:
    """Run the script as Python does; return its exit code."""
    sys.argv = [word for word in words if word != "-u"]  # torchrun wants no buffers
    sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
    warnings.simplefilter("ignore")
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
