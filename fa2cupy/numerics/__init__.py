"""Formulas of attention with whole score matrices, for the references, and the comparison of results with them."""
