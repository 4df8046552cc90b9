# SPDX-License-Identifier: Apache-2.0
"""Measurements of links, of this machine and of models: the only tools that import torch."""
