"""Calls on CuPy arrays: prepared once for a signature, then pointers and launches."""
