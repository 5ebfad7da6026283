"""Row optimizers of tables that TorchRec's `apply_optimizer_in_backward` was called for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from freescale.embedding.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad

# of fused kernels, if not given
_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
# by the name of the class: ours, and the options that both have
_KNOWN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "SGD": (SGD, ("lr",)),
    "Adagrad": (Adagrad, ("lr", "eps")),
    "RowWiseAdagrad": (RowWiseAdagrad, ("lr", "eps")),
    "Adam": (Adam, ("lr", "betas", "eps")),
}


def find_row_optimizer(table: str, weight: Tensor) -> RowOptimizer | None:
    """What the weight of a table was given; None if it was given nothing.

    Raises:
        ValueError: there is no such row optimizer here.
    """
    classes = getattr(weight, "_optimizer_classes", ())
    if not classes:
        return None
    (kind, *more), options = classes, dict(weight._optimizer_kwargs[0])  # type: ignore[attr-defined]
    if more or kind.__name__ not in _KNOWN:
        names = ", ".join(each.__name__ for each in classes)
        raise ValueError(
            f"table {table!r} has {names} by apply_optimizer_in_backward; rows are updated by one "
            f"of {', '.join(_KNOWN)}: give row_optimizer="
        )
    ours, known = _KNOWN[kind.__name__]
    strange = {name: value for name, value in options.items() if name not in known and value}
    if strange:
        raise ValueError(
            f"table {table!r} has {kind.__name__} with {strange}, which row optimizers do not "
            "have: give row_optimizer="
        )
    options = {name: value for name, value in (_DEFAULTS | options).items() if name in known}
    made: RowOptimizer = ours(**options)
    return made
