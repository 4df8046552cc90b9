# SPDX-License-Identifier: Apache-2.0
"""A rank among the others: a world, its connections, and schedules that run on its buffers."""
