"""Kernels broken on purpose, each in one place, which the simulated tests must catch.

A mutant is a patch to the rendered source. It names what catches it: the interpreter (a race, an access out of bounds
or of uninitialised memory, a deadlock), the check of what was written, or the numerical rule.
"""
