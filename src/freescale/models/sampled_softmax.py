"""Sampled softmax over jagged samples, whose logits never exist all at once."""

from __future__ import annotations

import torch

from freescale.kernels.groups import Groups

LOGIT_BUDGET = 1 << 18  # logits at a time: about a core's cache


class SampledSoftmax(torch.autograd.Function):
    """Sum over tokens of weight * -log(softmax of the target among target and negatives).

    Gradients are made together with the loss, a tile of logits at a time, so that no [tokens, K] is
    ever kept.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        outputs,  # [tokens, width], divided by the temperature
        positive,  # [tokens]: the targets' logits
        rows,  # [samples, K, width]
        targets,  # Jagged: ids, one per token
        negatives,  # [samples, K] ids
        weights,  # [tokens] or None
        need_grad,
    ):
        if need_grad:
            grad_outputs, grad_positive, grad_rows = (
                torch.zeros_like(t) for t in (outputs, positive, rows)
            )
        loss = torch.zeros_like(positive)
        cost = lambda length: length * negatives.shape[1]  # noqa: E731
        groups = Groups.of(targets.lengths, cost, LOGIT_BUDGET, targets.host_lengths.numpy())
        with torch.autocast(outputs.device.type, enabled=False):
            for group in groups.groups:
                x = group.pad(outputs)  # [n, length, width]
                others = rows[group.samples]  # [n, K, width]
                hit = group.pad(targets.values)[:, :, None] == negatives[group.samples][:, None, :]
                own = group.pad(positive)[:, :, None]
                logits = torch.bmm(x, others.transpose(1, 2).contiguous())  # [n, length, K]
                logits.masked_fill_(hit, -torch.inf)
                top = torch.maximum(logits.amax(2, keepdim=True), own)
                logits.sub_(top).exp_()
                total = (own - top).exp_().add_(logits.sum(2, keepdim=True))  # [n, length, 1]
                loss[group.tokens] = group.unpad((total.log() + top - own)[:, :, 0])
                if need_grad:
                    # softmax without the target; where padding has some, its x is 0
                    shares = logits.div_(total)
                    if weights is not None:
                        shares.mul_(group.pad(weights)[:, :, None])
                    grad_outputs[group.tokens] = group.unpad(torch.bmm(shares, others))
                    grad_positive[group.tokens] = -group.unpad(shares.sum(2))
                    grad_rows[group.samples] = torch.bmm(shares.transpose(1, 2), x)
        if need_grad:
            ctx.save_for_backward(grad_outputs, grad_positive, grad_rows)
        return loss.sum() if weights is None else (loss * weights).sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *(part * grad for part in ctx.saved_tensors), None, None, None, None
