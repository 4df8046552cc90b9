# SPDX-License-Identifier: Apache-2.0
"""Profiles of hypothesis: no test fails because a machine is busy, and ``make fuzz`` tries more cases."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("busy"), max_examples=1_800, print_blob=True)
settings.load_profile("busy")
