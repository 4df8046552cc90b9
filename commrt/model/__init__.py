# SPDX-License-Identifier: Apache-2.0
"""What has to be known of a model and its optimizer: state, settings, and when a step may be taken."""
