# SPDX-License-Identifier: Apache-2.0
"""Files that commands write, such as pictures; refused before the work starts if they cannot be.

Asking creates and changes nothing; `write` and `save_picture` write the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.errors import CommrtError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".svg", ".png", ".pdf")


def require_writable(option: str, path: str, example: str, endings: Sequence[str] = ()) -> None:
    """Raise `UsageError` if no file can be written at `path`, the value of `option`.

    `example` is a file name. With `endings` the name must end in one of them.
    """
    if not path:
        raise UsageError(
            f'{option} "": the name of the file is empty: give one, such as {option} {example}'
        )
    file = Path(path)
    if endings and file.suffix not in endings:
        raise UsageError(f"{option} {path}: give a file that ends in {', '.join(endings)}")
    try:
        folder = file.resolve().parent
        exists = file.exists()
        is_folder = file.is_dir()
    except OSError as error:  # a name that is too long, for instance
        raise UsageError(f"{option}: no file can have this name: {error.strerror}") from error
    if not folder.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written: there is no folder {folder}, make it first"
        )
    if is_folder:
        raise UsageError(f"{option} {path} is a folder: give a file, such as {file / example}")
    if not os.access(file if exists else folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written by this user: give another file")


def write(option: str, path: str, save: Callable[[], object]) -> None:
    """Call `save`, which writes `path`; raise `CommrtError` if the disk refuses."""
    try:
        save()
    except OSError as error:
        raise CommrtError(f"{option} {path} could not be written: {error}") from error


def require_picture(out: str) -> None:
    """Raise `UsageError` unless a picture can be written to `out`."""
    require_writable("--out", out, "picture.svg", PICTURE_FORMATS)


def save_picture(figure: Figure, out: str) -> None:
    """Write `figure` to `out`; raise `CommrtError` if the disk refuses."""
    write("--out", out, lambda: figure.savefig(out, dpi=150))
