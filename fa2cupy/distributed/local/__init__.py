"""What a rank does by itself between messages and attention calls: it queues work, copies and sums."""
