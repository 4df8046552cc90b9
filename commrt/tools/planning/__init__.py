# SPDX-License-Identifier: Apache-2.0
"""Training steps as a planner sees them: timelines, stragglers, plans. Needs only numpy."""
