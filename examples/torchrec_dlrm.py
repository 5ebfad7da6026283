"""TorchRec's DLRM, its definition untouched, on random data.

torchrun --nproc-per-node 2 examples/torchrec_dlrm.py    # or: python examples/torchrec_dlrm.py
"""

import torch
from torchrec.datasets.random import RandomRecDataset
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import freescale

FEATURES = [f"cat_{number}" for number in range(26)]
ROWS, WIDTH, DENSE = 10_000, 16, 13


def main(steps: int = 20) -> list[float]:
    transport = freescale.connect()
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name]
        )
        for name in FEATURES
    ]
    model = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=DENSE,
            dense_arch_layer_sizes=[64, WIDTH],
            over_arch_layer_sizes=[64, 1],
        )
    )
    sparse = model.model.sparse_arch.parameters()
    apply_optimizer_in_backward(RowWiseAdagrad, sparse, {"lr": 0.02})
    sharded = freescale.torchrec.parallelize(model, transport=transport)
    optimizer = torch.optim.Adagrad(sharded.dense_parameters(), lr=0.02)
    pipeline = freescale.torchrec.Pipeline(sharded, optimizer)
    data = RandomRecDataset(
        FEATURES,
        batch_size=64,
        hash_size=ROWS,
        ids_per_feature=3,
        num_dense=DENSE,
        manual_seed=transport.rank,
        num_batches=steps,
    )
    iterator = iter(data)
    losses = []
    for _ in range(steps):
        pipeline.progress(iterator)  # returns the model's outputs other than the loss
        losses.append(pipeline.last.loss)
    if transport.rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {transport.world} ranks")
    return losses


if __name__ == "__main__":
    main()
