"""How a sequence is divided among ranks: which part of which array goes where, and which calls follow."""
