# SPDX-License-Identifier: Apache-2.0
"""What commands show: pictures of schedules and steps, and timelines."""
