"""Calls on NumPy arrays: the tiled algorithms of FlashAttention-2 with BLAS matrix products."""
