"""TorchRec's TrainPipelinePEC (TorchRec 1.9) as a benchmark arm on CPU.

It is exact: rows that two successive batches share wait for the update between them, all others are
read before it, and their gradients are applied one step late. Its tables are row-wise.

TorchRec runs it on CUDA only, although just the bookkeeping of streams needs that: on CPU tensors
`record_stream` raises, and so does recording an event. `CpuPipelinePEC` leaves both out; what is
computed and sent is TorchRec's own. Unlike TorchRec's other pipelines PEC does not divide the
gradients of rows by the number of ranks; here they are.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.train_pipeline.pec_train_pipeline import TrainPipelinePEC
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

__all__ = ["CpuPipelinePEC", "PECEmbeddingCollection", "PECEmbeddingCollectionSharder"]

_NO_EVENT = SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)


class CpuPipelinePEC(TrainPipelinePEC):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._input_dist_event = self._overlap_dist_event = _NO_EVENT

    @staticmethod
    def _record_stream_forward_ctx(ctx: Any, stream: Any) -> None:
        pass

    @staticmethod
    def _record_stream_backward_ctx(ctx: Any, stream: Any) -> None:
        pass

    def _backward(self, losses: Tensor) -> None:
        super()._backward(losses)
        for name in self._pec_modules:
            for sent in self._pec_module_ctx(self.contexts[0], name).autograd_ctx_per_sharding:
                for part in (sent.ol_grad_apply, sent.nol_grad_apply):
                    part._grad.div_(dist.get_world_size())

    def apply_deferred(self) -> None:
        """Applies the gradients of the last batch that wait for the next step."""
        self._wait_pec_grad(self._start_deferred_nol_grad(self.contexts[0]))
