# SPDX-License-Identifier: Apache-2.0
"""The cost of schedules on described clusters, stragglers, and plans: which algorithm to use. Needs only numpy."""
