"""A model with features of every kind, and batches for it, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.models import HSTU, FeatureTables, Retrieval, SASRec
from freescale.transport.local import LocalTransport

ITEMS, SAMPLES = 500, 32
VECTORS = torch.randn(ITEMS + 1, 24, generator=torch.Generator().manual_seed(5)).half()
TABLES = FeatureTables(item=40, event=9, user=17, user_places=(1, 2), vectors=[VECTORS], context=5)
SOME = {
    "all": TABLES,
    "without users": replace(TABLES, user=0, user_places=()),  # HSTU is captured in graphs
    "without vectors": replace(TABLES, vectors=()),
}


def make_batch(seed, per):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 60, (SAMPLES,), generator=generator)
    tokens = int(lengths.sum())
    codes = torch.randint(0, 40, (ITEMS, 3), generator=torch.Generator().manual_seed(99))
    own = torch.arange(ITEMS) % 5 / 4

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    ids = {"history": draw(ITEMS, tokens), "targets": draw(ITEMS, tokens)}
    homes = {"sequences": {}, "dense": {}, "shared": {}}
    for name, values in ids.items():
        parts = {name: values, f"{name}_features": codes[values], f"{name}_own": own[values]}
        parts[f"{name}_vectors"] = values
        homes["sequences"] |= {n: Jagged(value, lengths) for n, value in parts.items()}
    wrong = draw(ITEMS, SAMPLES, 16) if per == "sample" else draw(ITEMS, 64)
    homes["dense" if per == "sample" else "shared"] |= {
        "negatives": wrong, "negatives_features": codes[wrong], "negatives_own": own[wrong],
        "negatives_vectors": wrong,
    }  # fmt: skip
    homes["sequences"]["timestamps"] = Jagged(torch.arange(tokens) * 60, lengths)
    homes["sequences"]["event_features"] = Jagged(draw(9, tokens, 2), lengths)
    homes["sequences"]["context_features"] = Jagged(draw(5, tokens, 1), lengths)
    homes["dense"]["user_features"] = draw(17, SAMPLES, 3)
    return SequenceBatch(
        **homes, weights={"next_item": lengths.float()}, keys=torch.arange(SAMPLES) * 7919 + seed
    )


def make_encoder(kind):
    sizes = {"width": 64, "layers": 2, "heads": 2, "max_length": 64, "dropout": 0.2}
    return SASRec(**sizes) if kind == "sasrec" else HSTU(**sizes)


def train(device, kind, per, schedule="staged", tables=TABLES):
    torch.manual_seed(0)
    model = Retrieval(
        make_encoder(kind), num_items=ITEMS, feature_tables=tables, table_device="meta"
    )
    parallel = freescale.parallelize(
        model, model.features, freescale.Adam(lr=1e-2), transport=LocalTransport(device),
        init_std=0.125,
    )  # fmt: skip
    pipeline = freescale.Pipeline(
        parallel, torch.optim.AdamW(parallel.dense_parameters(), lr=1e-3), precision="fp32",
        schedule=schedule,
    )  # fmt: skip
    losses = [r.loss for r in pipeline.run([make_batch(seed, per) for seed in range(6)])]
    rows = {name: parallel.tables.get_local_rows(name)[1].cpu() for name in model.features}
    pipeline.close()
    return losses, rows
