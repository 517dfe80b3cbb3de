"""Messages between ranks: threads, MPI or NCCL."""
