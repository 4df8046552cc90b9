# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs on a described cluster, and which one is cheapest. Needs only numpy."""
