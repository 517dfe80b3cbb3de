"""What `scaleout.py` runs on each rank, and how it runs ranks."""
