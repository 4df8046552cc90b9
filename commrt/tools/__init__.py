# SPDX-License-Identifier: Apache-2.0
"""What one does before and after training: plan, simulate, draw, measure. No training job imports it."""
