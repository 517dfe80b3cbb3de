"""What carries parts of arrays between ranks: copies to each other's memory, or messages."""
