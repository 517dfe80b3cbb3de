"""Formulas of attention as a whole, for the references, and how results are compared with them."""
