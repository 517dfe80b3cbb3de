"""What a call of several ranks goes through: checks, agreement, the choice of a scheme, and the arrays of its parts."""
