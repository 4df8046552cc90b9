# SPDX-License-Identifier: Apache-2.0
"""What commands show: tables, pictures, timelines, and the page of a training run."""
