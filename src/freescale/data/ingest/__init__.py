"""From files of interactions to histories: readers, ids, times, and what is prepared and kept."""
