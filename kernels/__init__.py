"""Kernels that touch gradients: each in plain torch, which is its definition. Import as ``commrt.kernels``."""
