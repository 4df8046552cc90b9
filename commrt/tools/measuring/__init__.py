# SPDX-License-Identifier: Apache-2.0
"""What is measured: links of a world, this machine, and models.
The only tools that import torch.
"""
