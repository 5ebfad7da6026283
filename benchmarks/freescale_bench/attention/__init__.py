"""`freescale bench attention`: the attention kernels against those of torch, and against
themselves with biases and with fewer visible keys."""
