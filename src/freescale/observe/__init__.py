"""What happened: spans, collective arrivals and counters of every rank, and the figures made from them."""
