# SPDX-License-Identifier: Apache-2.0
"""A world of ranks, its connections, and schedules that run on its buffers."""
