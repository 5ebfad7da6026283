"""Actions of events, made of ratings or of feedback columns, and other columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.ingest.layouts import FEEDBACK
from freescale.data.ingest.tables import TableBlock
from freescale.data.values import BadValue, parse_numbers, refuse_nulls


def make_action(ratings: pa.Array) -> pa.Array:
    doubled = pc.round(pc.multiply(parse_numbers(ratings), 2.0), round_mode="half_up")
    action = doubled.cast(pa.int64())
    row = pc.index(pc.less(action, 0), pa.scalar(True)).as_py()
    if row >= 0:
        raise BadValue(
            row,
            f"holds {ratings[row].as_py()}, and a rating is 0 or more",
            "mend it, or leave ratings out: --columns rating=",
        )
    return action


def make_feedback_action(block: TableBlock, names: Sequence[str]) -> Mapping[str, pa.Array]:
    action = pa.repeat(pa.scalar(0, pa.int64()), block.table.num_rows)
    flags = {}
    for name in names:
        flag = block.convert(name, _take_flag)
        action = pc.bit_wise_or(action, pc.shift_left(flag.cast(pa.int64()), FEEDBACK.index(name)))
        flags[name] = flag
    return {"action": action, **flags}


def _take_flag(values: pa.Array) -> pa.Array:
    numbers = parse_numbers(values)
    wrong = pc.invert(pc.or_(pc.equal(numbers, 0.0), pc.equal(numbers, 1.0)))
    row = pc.index(wrong, pa.scalar(True)).as_py()
    if row >= 0:
        raise BadValue(row, f"holds {values[row].as_py()}, not 0 or 1", "mend or drop those rows")
    return numbers.cast(pa.int8())


def take_side(values: pa.Array) -> pa.Array:
    refuse_nulls(values)
    return values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
