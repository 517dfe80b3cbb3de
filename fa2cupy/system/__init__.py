"""Access to the operating system: folders that only the user can write to, locks, and a progress bar."""
