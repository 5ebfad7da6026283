"""Names of metrics: all of them, the headlines, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CUTOFFS = (1, 5, 10, 20, 50, 100, 200)  # k of HR@k and NDCG@k
UNSEEN = "/unseen"  # suffix: ranked among the items that the history does not hold
COLD = "/cold"  # suffix: of the targets with few training events
COLD_EVENTS = 5  # most training events of a cold item
REPEATS = "repeats"  # share of targets that the history holds
COLD_TARGETS = "cold"  # share of targets with few training events
_PER_TASK = ("ne", "auc", "gauc")  # of ranking, each as metric/task
_HEADLINES = ("hr@10", "ndcg@10")


def list_metrics(task: str, labels: Sequence[str] = ()) -> list[str]:
    """The metrics of `retrieval`, or of `ranking` with these labels."""
    if task == "ranking":
        return [f"{metric}/{label}" for label in labels for metric in _PER_TASK]
    ranked = [f"{kind}@{k}" for kind in ("hr", "ndcg") for k in CUTOFFS] + ["mrr"]
    return [*ranked, *(name + UNSEEN for name in ranked), REPEATS]


def choose_metric(task: str, labels: Sequence[str] = ()) -> str:
    """The metric that compares checkpoints by default."""
    return f"ne/{labels[0]}" if task == "ranking" else f"ndcg@10{UNSEEN}"


def describe_metrics(task: str, labels: Sequence[str] = ()) -> str:
    """Lists the metrics that can be compared, for messages."""
    if task == "ranking":
        return ", ".join(list_metrics(task, labels))
    sizes = ", ".join(map(str, CUTOFFS))
    return f"hr@K, ndcg@K (K is {sizes}) and mrr, each also with {UNSEEN} behind it"


def is_better(metric: str, value: float, than: float | None) -> bool:
    """Whether a value of the metric is better than another, or than none. NaN never is."""
    if value != value:
        return False
    return than is None or (value < than if metric.startswith("ne/") else value > than)


def select_headlines(names: Iterable[str]) -> list[str]:
    """Selects the metrics for one line: HR@10 and NDCG@10, over all items and over the unseen
    ones. If these are missing, all of them."""
    listed = list(names)
    wanted = [name + kind for kind in ("", UNSEEN) for name in _HEADLINES]
    return [name for name in wanted if name in listed] or listed
