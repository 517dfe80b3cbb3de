"""Compilation of kernels: their key, parameter record and source, the compiler and the cache."""
