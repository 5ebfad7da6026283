"""The staged schedule as tables: on two hosts, and on GPU ranks."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, format_verdict, single

_ARMS = ("serial", "TorchRec TrainPipelineSparseDist", "staged")
_EXPOSED = "exposed ids, rows, gradients"


def format_staged(used: Results, folder: str) -> str:
    """Formats samples/s and exposed communication by configuration, on two hosts."""
    timed = [row for row in single(used)["rows"] if "samples_per_second" in row]
    rows = []
    for name in dict.fromkeys(row["configuration"] for row in timed):
        by = {row["arm"]: row for row in timed if row["configuration"] == name}
        rate = {arm: by[arm]["samples_per_second"]["median"] for arm in _ARMS}
        exposed = {arm: by[arm]["exposed_embedding_ms"]["median"] for arm in _ARMS}
        hand = [row["samples_per_second"]["median"] for arm, row in by.items() if "by hand" in arm]
        torchrec = f"{rate[_ARMS[1]]:.0f}" + "".join(
            f" ({value:.0f} with ids deduplicated by hand)" for value in hand
        )
        rows.append(
            (
                name,
                f"{rate['serial']:.0f}, {torchrec}, {rate['staged']:.0f}",
                f"{rate['staged'] / rate[_ARMS[1]]:.2f} x",
                ", ".join(f"{exposed[arm]:.1f}" for arm in _ARMS) + " ms",
                f"{100 * exposed['staged'] / exposed['serial']:.1f} %",
            )
        )
    head = (
        "",
        "samples/s: serial, TorchRec, staged",
        "staged over TorchRec",
        _EXPOSED,
        "staged of serial's",
    )
    return format_table(used, folder, head, rows)


def format_staged_gpu(used: Results, folder: str) -> str:
    rows = [
        (
            row["arm"],
            f"{row['step_ms']['median']:.1f} ms",
            f"{row['exposed_embedding_ms']['median']:.2f} ms",
            f"{row['waited_for_lanes_ms']['median']:.2f} ms" if row["arm"] != "serial" else "",
            "yes" if row["arm"] == "serial" or row["losses_equal_serial"] else "no",
        )
        for row in single(used)["rows"]
    ]
    head = (
        "",
        "step",
        _EXPOSED,
        "the main thread waits for lanes",
        "losses equal serial's in every bit",
    )
    return format_table(used, folder, head, rows, note=format_verdict(used))
