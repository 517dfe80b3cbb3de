"""Kernels broken on purpose, each in one place: what the simulated tests are worth.

A mutant is a patch to the rendered source. It names what catches it: the interpreter (a race, an access out of bounds
or of uninitialised memory, a deadlock), the look at what was written, or the numerical rule.
"""
