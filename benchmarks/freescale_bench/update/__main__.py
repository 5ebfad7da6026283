"""Daily updates (`freescale train --from`) against training from scratch, day after day.

Every event of a day is ranked before that day is trained on, by three models: one that is updated
every night, one that is trained from scratch on everything so far, and one that stays as it was on
the first day. Figures of training from scratch are for the days on which that happens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("update", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="integer ids, times in seconds")
    parser.add_argument("--days", type=int, default=30, help="updates, one for each last day (30)")
    parser.add_argument("--every", type=int, default=5, help="days between trainings anew (5)")
    parser.add_argument("--epochs", type=int, default=8, help="of a training from scratch (8)")
    parser.add_argument("--update-epochs", type=int, default=4, help="of an update (4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trial", action="store_true", help="few events; writes no result")
    options = parser.parse_args(arguments)
    from freescale_bench.update.bench import Setting, bench_update

    setting = Setting(options.days, options.every, options.epochs, options.update_epochs)
    bench_update(options.data, setting, options.device, options.trial, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
