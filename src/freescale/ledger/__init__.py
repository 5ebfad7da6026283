"""Where the time of each step went, on every rank."""
