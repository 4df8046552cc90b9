# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter here; it decides at its first import."""

import os

os.environ["TRITON_INTERPRET"] = "1"
