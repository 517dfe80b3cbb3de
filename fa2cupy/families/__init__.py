"""The kernel families: the problems that each supports, its tiles and records, and the choice among them."""
