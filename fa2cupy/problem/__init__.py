"""What was asked: the problem, its features, and every check of what the caller passes."""
