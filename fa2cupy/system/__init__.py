"""What the package needs of the operating system: folders that only the user writes to, locks, a progress bar."""
