"""What README.md and docs/ say from measurements: tables, sentences with numbers, and the README's picture."""
