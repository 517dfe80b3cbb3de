"""The work of `scaleout.py` on each rank, and the processes of the ranks."""
