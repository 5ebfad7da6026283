"""Benchmarks: `freescale bench NAME`, or `python -m freescale_bench.NAME`, where click is not
installed."""

# In the order of `freescale bench --help`: what each measures.
BENCHMARKS = {
    "ladder": "TorchRec, then one technique more on each rung: samples/s, waits, memory, loss.",
    "staged": "Exposed communication and samples/s of the staged schedule.",
    "torchrec": "Models of TorchRec's here and there: what they train, and samples/s.",
    "balance": "Straggler % with and without balancing, predicted and measured.",
    "overlap": "What communication costs the compute beside it, NCCL's and hostwire's.",
    "kernels": "Time and share of the GPU's ceiling of each Triton kernel.",
    "quality": "HR@10 and NDCG@10 of a recipe over several seeds, beside popularity and a peer.",
    "checkpoint": "What checkpoints and snapshots add to training, and restores from both.",
    "faults": "Training under a storm of faults, beside the run that nothing happens to.",
    "host_tables": "Step time with tables in host memory or on a disk beside the device's.",
    "dynamic": "Tables whose rows come and go: ids/s, memory, lookups beside a static table's.",
    "simulate": "The simulator against measured runs, and to 4,096 GPUs.",
    "train": "What freescale train makes of one GPU, shape by shape.",
}
