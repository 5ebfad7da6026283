"""Transport without multiprocessors: copy engines to and from the host, wires between hosts."""
