"""Storms of faults: a run is killed, stalled and cut off at planned moments, and has to end as the
run that nothing happens to. `freescale bench faults` makes them, and so do tests."""
