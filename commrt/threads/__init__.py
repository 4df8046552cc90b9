# SPDX-License-Identifier: Apache-2.0
"""The communication thread, and what others need to work with it: futures, deadlines, GPU streams,
recorders.
"""
