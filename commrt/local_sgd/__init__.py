# SPDX-License-Identifier: Apache-2.0
"""Train by local SGD: fragments of the model, their exchange and their merge."""
