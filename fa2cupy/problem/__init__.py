"""The problem that a call poses: its sizes, its features, and the checks of its arguments."""
