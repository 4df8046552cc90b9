# SPDX-License-Identifier: Apache-2.0
"""The command ``commrt``, which is also ``python -m commrt``. What it needs besides is an extra."""

import sys


def main() -> None:
    """Run the command; without its packages, say in one line what to install."""
    try:
        from commrt.tools.commands import app  # noqa: PLC0415  # may be impossible
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"commrt: the command needs {error.name}: pip install 'commrt[cli]'")
    app.main()


if __name__ == "__main__":
    main()
