"""TorchRec's models in FreeScale against TorchRec, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single


def format_torchrec(used: Results, folder: str) -> str:
    """Formats samples/s, processor time and bytes by pooling factor, with the crossover."""
    result = single(used)
    head = (
        "ids of a sample and table",
        "samples/s: TorchRec, freescale",
        "freescale over TorchRec",
        "processor, ms a step",
        "sent by a rank, MB a step",
    )
    rows = []
    for factor in dict.fromkeys(row["factor"] for row in result["rows"]):
        ours, theirs = (row for row in result["rows"] if row["factor"] == factor)
        pair = (theirs, ours)
        sent = [
            sum(row["bytes_per_step"].values()) / 1e6 for row in pair if "bytes_per_step" in row
        ]
        rows.append(
            (
                f"{factor}",
                ", ".join(f"{row['samples_per_second']['median']:.0f}" for row in pair),
                f"{result['times_torchrec'][str(factor)]:.2f} x",
                ", ".join(f"{row['cpu_ms']['median']:.0f}" for row in pair),
                ", ".join(f"{value:.1f}" for value in sent) or "not recorded",
            )
        )
    crossover = result["crossover_factor"]
    note = f"Above about {crossover:.1f} ids TorchRec is faster." if crossover else ""
    about = result["shape"]
    conditions = (
        f"DLRM, {about['tables']} tables of {about['rows']:,} x {about['width']}, Zipf "
        f"{about['popularity']}, {about['samples']} samples a rank (fewer at more than 20 ids)."
    )
    return format_table(used, folder, head, rows, note=note, conditions=conditions)
