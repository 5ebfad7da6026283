"""Benchmarks: `freescale bench NAME`, or `python -m freescale_bench.NAME` without click."""

# What each measures, in the order of `freescale bench --help`.
BENCHMARKS = {
    "ladder": "TorchRec, then one technique more on each rung: samples/s, waits, memory, loss.",
    "staged": "Exposed communication and samples/s of the staged schedule.",
    "torchrec": "TorchRec's models in FreeScale and in TorchRec: parity and samples/s.",
    "balance": "Straggler % with and without balancing, predicted and measured.",
    "split": "Histories divided over ranks: equal to whole ones, step time, memory.",
    "exchange": "Two-level exchange: bytes between machines, bits and step times.",
    "overlap": "How much NCCL and hostwire slow down concurrent compute.",
    "kernels": "Time of each Triton kernel, and its share of the GPU's ceiling.",
    "quality": "HR@10 and NDCG@10 of a recipe over several seeds, against popularity and a peer.",
    "features": "What features of items add to quality, and what they cost a step.",
    "recommend": "Time of serving a user's new event, with and without the state of the history.",
    "update": "Quality and cost of daily updates, against training from scratch every day.",
    "stream": "Runs that follow a source: kills, long streams, preferences that shift.",
    "store": "Event store: building it, appending to it, and reading samples in order of time.",
    "stores": "S3: training, resume and export as on a disk; kills; histories by DuckDB and Spark.",
    "checkpoint": "What checkpoints and snapshots add to training, and restores from both.",
    "faults": "Training under a storm of faults, compared with an undisturbed run.",
    "attention": "Attention kernels: softmax against SDPA, biases, semi-local against full.",
    "dlrm": "MLPerf's dlrm_v4_hstu: parity with the public model, speed, learning, hot ids.",
    "host_tables": "Step time with tables in host memory or on disk, against tables on the device.",
    "dynamic": "Dynamic tables: ids/s, memory, and lookups against a static table.",
    "simulate": "The simulator against measured runs, and to 4,096 GPUs.",
    "train": "How well freescale train uses one GPU, shape by shape.",
}
