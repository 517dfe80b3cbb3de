"""What several test modules share. Nothing here is a test, and no test module is imported here."""
