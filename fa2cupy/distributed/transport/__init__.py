"""Messages between ranks, by threads, MPI or NCCL, and how processes find each other."""
