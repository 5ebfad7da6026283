"""The ladder as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, capitalize, format_known, format_table, single
from freescale_bench.ladder.figure import choose_parity, describe_conditions, find_median, find_peer
from freescale_bench.ladder.rungs import explain_rungs


def format_ladder(used: Results, folder: str) -> str:
    """TorchRec, then a technique more on each rung; a rung that is slower than TorchRec is said to
    be."""
    result = single(used)
    peer = find_peer(result["rows"])
    assert peer is not None, "the ladder has an arm of TorchRec's"
    base = peer["samples_per_second"]["median"]
    steps = choose_parity(result)
    rows = []
    for row in result["rows"]:
        times = row["samples_per_second"]["median"] / base
        ours = not row["arm"].startswith("TorchRec")
        slower = ", slower than TorchRec" if times < 1 and ours else ""
        rows.append(
            (
                row["arm"],
                f"{row['samples_per_second']['median']:.0f}",
                f"{times:.2f} x{slower}",
                format_known(find_median(row, "exposed_embedding_ms"), "ms", 0),
                format_known(find_median(row, "exposed_all_ms"), "ms", 0),
                format_known(find_median(row, "straggler_percent"), "%", 1),
                f"{row[f'{steps}_relative_loss_difference_to_serial']:.0e}".replace("0e+00", "0"),
            )
        )
    head = (
        "",
        "samples/s",
        f"of {peer['arm'].removeprefix('TorchRec TrainPipeline')}",
        "exposed ids, rows, gradients",
        "exposed, all",
        "straggler",
        "first loss, off serial's" if steps == "first_step" else "loss, off serial's",
    )
    asked = [
        f"{entry['claim']}: {entry['measured']:.3g} {entry['unit']} (target {entry['asked']:g})"
        for entry in result["claims"]
        if not entry["holds"]
    ]
    missed = f"\n\n**Targets missed.** {'; '.join(asked)}." if asked else ""
    where = f"{capitalize(describe_conditions(result))}; medians, arms in turn."
    note = explain_rungs(result, "`")
    return format_table(used, folder, head, rows, note=note, conditions=where) + missed
