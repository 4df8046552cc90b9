# SPDX-License-Identifier: Apache-2.0
"""The demo. The other examples take its data: ``from mnist.dataset import lenet, load``."""
