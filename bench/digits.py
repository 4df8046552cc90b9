# SPDX-License-Identifier: Apache-2.0
"""The images and the CNN of ``examples/mnist``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "mnist"))
from dataset import Images, lenet, load  # of that folder

__all__ = ["Images", "lenet", "load"]
