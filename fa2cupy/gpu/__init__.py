"""Calls on CuPy arrays, prepared once per signature; a warm call then only passes pointers and launches."""
