"""Generated histories with given lengths, popularity and collisions."""
