"""What a call of several ranks goes through: checks, agreement, streams, and the arrays of its parts."""
