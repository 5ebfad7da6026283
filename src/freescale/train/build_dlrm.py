"""Builds the model of --head dlrm from the configuration of a run."""

from __future__ import annotations

from typing import Any

from freescale.config import RunConfig
from freescale.models.dlrm import DlrmHSTU, DlrmRanking


def build_dlrm_encoder(config: RunConfig, context: int, **shared: Any) -> DlrmHSTU:
    """Builds the encoder of a model with `context` tokens. `shared`: options of every encoder."""
    if context and config.data.candidates > 1:
        raise ValueError(
            f"--candidates {config.data.candidates} with --head dlrm and features of requests: "
            "their tokens stand before the history, so that a sample has one request; give "
            "--candidates 1"
        )
    model, longest = config.model, shared.pop("max_length") + context
    return DlrmHSTU(
        context=context,
        positions=model.positions or longest + context + 1,
        time_buckets=model.time_buckets,
        max_length=longest,
        **shared,
    )


def build_dlrm(config: RunConfig, encoder: DlrmHSTU, **sizes: Any) -> DlrmRanking:
    """Builds the head around an encoder. `sizes`: of its tables."""
    model = config.model
    return DlrmRanking(
        encoder,
        tasks=config.label_names,
        input_hidden=model.input_hidden or max(1, model.width // 2),
        head_hidden=model.head_hidden or model.width,
        **sizes,
    )
