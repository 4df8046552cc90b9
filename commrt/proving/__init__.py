# SPDX-License-Identifier: Apache-2.0
"""What a schedule leaves on every rank, replayed with symbols instead of numbers; needs only numpy."""
