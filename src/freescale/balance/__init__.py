"""Which rank computes which sample: cost and partitioners, which are pure, and the exchange that
moves samples (`shuffle`)."""
