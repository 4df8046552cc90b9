# SPDX-License-Identifier: Apache-2.0
"""The communication thread, and what other threads need to work with it: futures, deadlines and GPU streams."""
