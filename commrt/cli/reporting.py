# SPDX-License-Identifier: Apache-2.0
"""``commrt train --report DIR``: where the page goes, before anything is trained, and what it says of the machine."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile

from commrt.cli.figures import require_matplotlib
from commrt.cli.history import MOST_TURNS
from commrt.cli.host import cpus
from commrt.errors import CommrtError, UsageError

__all__ = ["GENERATOR", "facts", "prepare", "write"]

NAME = "report.html"
GENERATOR = "commrt train --report"
"""In the head of a page of ours."""
LOOKED_AT = 2000
"""Characters at the begin of a page, which hold its head."""
PACKAGES = ("commrt", "torch", "numpy", "matplotlib", "mlxtend")


def prepare(folder: str) -> Path:
    """Make `folder`, and say where the page will be; raises `UsageError` if it cannot be written, or is not ours."""
    require_matplotlib("--report: its pictures")
    path = Path(folder) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".commrt-"):
            pass
    except OSError as error:
        raise UsageError(f"--report {folder}: nothing can be written there: {error}") from error
    if path.exists() and not _is_ours(path):
        raise UsageError(
            f"--report {folder}: there is a {NAME} that commrt did not write: move it, or name another folder"
        )
    return path


def _is_ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return GENERATOR in file.read(LOOKED_AT)
    except (OSError, UnicodeDecodeError):
        return False


def write(path: Path, text: str) -> None:
    """Put the page there, whole or not at all; raises `CommrtError`."""
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".commrt-", delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o666 & ~_umask())
        Path(file.name).replace(path)
    except OSError as error:
        raise CommrtError(f"the run is over, but {path} could not be written: {error}") from error


def _umask() -> int:
    """What new files may not be, which can only be asked by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def facts(command: Sequence[str], transports: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and values of what the runs ran on."""
    yield "command", shlex.join([Path(command[0]).name, *command[1:]])
    yield "written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    yield "exchanged over", ", ".join(dict.fromkeys(transports))
    yield "processors", f"{cpus():g}"
    yield "machine", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "python", platform.python_version()
    for name in PACKAGES:
        yield name, _version(name)
    yield "kept", f"the first {MOST_TURNS:,} passes of each rank"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from a source tree"
