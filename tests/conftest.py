# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter, which decides at its first import; no test fails because a machine is busy."""

import os

from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

collect_ignore = ["launch_report.py", "c_launch_report.py"]  # programs of their own, in which Triton compiles
