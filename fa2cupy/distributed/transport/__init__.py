"""How bytes get to another rank: as messages, or as copies to its memory; and how processes find each other."""
