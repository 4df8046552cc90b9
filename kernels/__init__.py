"""Kernels between gradients and the wire, in plain torch and in Triton.

Import as ``commrt.kernels``.
"""
