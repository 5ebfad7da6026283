"""What a step would take on a cluster: the planners of training over a calibrated compute curve and
a network model."""
