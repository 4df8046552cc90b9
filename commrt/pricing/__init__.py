# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs on a cluster, and which one is soonest over; needs only numpy."""
