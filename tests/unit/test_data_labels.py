"""Ranking labels are 0 or 1; anything else is refused, by the user's own file and column."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.loading import load_histories

from freescale.data import Histories, prepare

NAN = float("nan")
BAD = [
    pytest.param(pa.array([0, 1, -1]), "-1", id="negative"),
    pytest.param(pa.array([0, 1, 2], pa.int8()), "2", id="two"),
    pytest.param(pa.array([0.0, 1.9, 1.0]), "1.9", id="above one"),
    pytest.param(pa.array([0.0, 0.25, 1.0], pa.float32()), "0.25", id="fraction"),
    pytest.param(pa.array([0.0, NAN, 1.0]), "nan", id="no number"),
    pytest.param(pa.array([0.0, -1.0, 1.0]), "-1.0", id="negative fraction"),
]
GOOD = [
    pa.array([0, 1, 1]),
    pa.array([0, 1, 1], pa.uint8()),
    pa.array([0.0, 1.0, -0.0]),
    pa.array([True, False, True]),
]


def interactions(path: Path, labels: pa.Array) -> Path:
    """Three events of a user, and a column that nobody names as a label."""
    columns = {
        "user_id": [1, 1, 1],
        "item_id": [0, 1, 2],
        "timestamp": [0, 1, 2],
        "like": labels,
        "score": [0.5, 7.0, NAN],
    }
    pq.write_table(pa.table(columns), path)
    return path


def histories(path: Path, labels: pa.Array, statistics: bool = True) -> Path:
    lists = {"item_id": pa.array([0, 1, 2]), "timestamp": pa.array([0, 1, 2]), "like": labels}
    columns = {name: pa.ListArray.from_arrays([0, 2, 3], values) for name, values in lists.items()}
    pq.write_table(
        pa.table({"user_id": [1, 2], **columns}),
        path,
        row_group_size=1,
        write_statistics=statistics,
    )
    return path


def ranking(path: Path, *tasks: str) -> Histories:
    return load_histories(path, 4, task="ranking", tasks=tasks or ("like",))


@pytest.mark.parametrize(("labels", "value"), BAD)
def test_other_labels_are_refused_by_the_name_of_the_file_that_holds_them(tmp_path, labels, value):
    good = interactions(tmp_path / "good.parquet", pa.array([0, 1, 0]).cast(labels.type))
    bad = interactions(tmp_path / "bad.parquet", labels)
    made = prepare([good, bad], tmp_path / "cache")
    with pytest.raises(ValueError) as error:
        ranking(made)
    assert str(error.value).startswith(f"{bad}: label column 'like' holds {value}, not 0 or 1; ")
    assert "\n" not in str(error.value) and "cache" not in str(error.value)
    assert len(load_histories(made, 4)) == 1  # for retrieval it is a column like any other


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(("labels", "value"), BAD)
def test_histories_made_elsewhere_are_looked_through(tmp_path, labels, value, statistics):
    path = histories(tmp_path / "histories.parquet", labels, statistics)
    with pytest.raises(
        ValueError, match=(f"histories.parquet: label column 'like' holds {value}, not 0 or 1; ")
    ):
        ranking(path)


@pytest.mark.parametrize("labels", GOOD, ids=lambda labels: str(labels.type))
def test_0_and_1_of_any_type_are_labels(tmp_path, labels):
    expected = [[float(value)] for value in labels.to_pylist()]
    made = prepare(interactions(tmp_path / "events.parquet", labels), tmp_path / "cache")
    elsewhere = histories(tmp_path / "histories.parquet", labels)
    # the first event of a user is history
    for path, labelled in ((made, expected[1:]), (elsewhere, expected[1:2])):
        batch = load_histories(path, 4, task="ranking", tasks=("like",), kind="none").batch(0)
        assert batch.sequences["labels"].values.tolist() == labelled


def test_a_rating_is_no_label_and_is_named_as_in_the_file(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n1,2,0.5,3\n1,3,4.0,4\n1,4,4.0,5\n")
    made = prepare(path, tmp_path / "cache")
    with pytest.raises(
        ValueError,
        match=(
            r"ratings.csv: label column 'action' \(made of "
            r"'rating'\) holds 8, not 0 or 1"
        ),
    ):
        ranking(made, "action")
