"""The files of torch.distributed.checkpoint: tensors by name, written by all ranks and read without
executing anything. What the tensors are is up to the caller."""
