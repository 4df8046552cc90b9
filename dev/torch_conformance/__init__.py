# SPDX-License-Identifier: Apache-2.0
"""Run torch's own tests of process groups on a backend of your choice,
without a change to torch.
"""
