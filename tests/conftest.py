# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter here; it decides at its first import."""

import os

os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = ["launch_report.py", "c_launch_report.py"]  # programs of their own, in which Triton compiles
