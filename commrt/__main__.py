# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt``: the same as the command ``commrt``."""

from commrt.tools.commands.app import main

if __name__ == "__main__":
    main()
