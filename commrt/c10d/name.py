# SPDX-License-Identifier: Apache-2.0
"""The name of the backend: ``init_process_group("commrt")``."""

NAME = "commrt"
