"""The kernel families: what each takes, its tiles and records, and the choice among them."""
