# SPDX-License-Identifier: Apache-2.0
"""The communication thread, and what goes with it: futures, deadlines, GPU streams, recorders."""
