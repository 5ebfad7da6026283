"""`freescale inspect` and `train` with features: from a CSV to a run that resumes, and what bad
files are refused for."""

from __future__ import annotations

import json
import re
from shutil import copytree, rmtree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from helpers.command import freescale
from helpers.small_runs import SMALL

from freescale.cli.main import main
from freescale.config import DataConfig, RunConfig
from freescale.data.batches.specs import SplitSpec
from freescale.data.features.attributes import AttributeFile
from freescale.data.features.prepare import prepare_features
from freescale.train.build import prepare_data

EVENTS = "customer,sku,date,channel,amount\n"
ITEMS = "sku,category,price,title\n"


def write_files(folder, items=None, events=None):
    random = np.random.default_rng(0)
    rows = [
        f"C{random.integers(0, 30)},S{random.integers(0, 40)},{1_700_000_000 + 60 * n},"
        f"{random.choice(['web', 'app', ''])},{random.integers(1, 900)}"
        for n in range(360)
    ]
    (folder / "sales.csv").write_text(events or EVENTS + "\n".join(rows) + "\n")
    described = [f"S{n},c{n % 5},{n}.5,Title {n}" for n in range(3, 45)]
    (folder / "items.csv").write_text(items or ITEMS + "\n".join(described) + "\n")
    return folder / "sales.csv", folder / "items.csv"


def run(folder, *words):
    result = CliRunner().invoke(main, [*map(str, words), "--cache", str(folder / "cache")])
    return result.exit_code, result.output


def test_inspect_says_what_each_column_becomes(tmp_path):
    sales, items = write_files(tmp_path)
    code, output = run(tmp_path, "inspect", sales, "--items", items)
    assert code == 0, output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert f"columns of {sales}:" in lines and f"columns of {items}:" in lines
    assert "category 5 values, 0.0% missing categorical" in lines
    assert "price 42 values, 0.0% missing numeric" in lines
    assert any(line.startswith("channel 2 values") and "not used" in line for line in lines)
    assert any(line.startswith("title 42 values") and "left out" in line for line in lines)
    assert "use them as features: --features category,price,channel,amount" in lines
    assert f"train on it: freescale train --data {sales} --items {items}" in lines[-1]


def test_a_written_schema_trains_like_the_options(tmp_path):
    sales, items = write_files(tmp_path)
    schema = tmp_path / "features.toml"
    options = ["--items", items, "--features", "auto"]
    code, output = run(tmp_path, "inspect", sales, *options, "--write-schema", schema)
    assert code == 0 and f"wrote {schema}: 4 features" in output
    steps = ["--data", sales, "--steps", "4", *SMALL, "--cache", tmp_path / "cache"]
    losses = []
    for name, chosen in (("a", options), ("b", ["--items", items, "--schema", schema])):
        done = freescale("train", *steps, "--folder", tmp_path / name, *chosen)
        assert done.returncode == 0, done.stderr
        assert (
            "feature item.category (categorical): 5 categories of the training part" in done.stdout
        )
        assert "feature event.amount (numeric): 32 buckets" in done.stdout
        assert "columns left out" not in done.stdout.replace("columns of the items left out", "")
        losses.append(read_losses(tmp_path / name))
    assert losses[0] == losses[1]


def read_losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def test_a_run_resumes_and_is_evaluated_with_its_own_statistics(tmp_path):
    sales, items = write_files(tmp_path)
    words = ["train", "--data", sales, "--items", items, "--features", "category,price,channel"]
    words += [*SMALL, "--cache", tmp_path / "cache", "--log-every", "1", "--id-dropout", "0.2"]
    whole = freescale(*words, "--folder", tmp_path / "whole", "--steps", "6")
    assert whole.returncode == 0, whole.stderr
    first = freescale(*words, "--folder", tmp_path / "parts", "--steps", "3")
    assert first.returncode == 0, first.stderr
    second = freescale(*words, "--folder", tmp_path / "parts", "--steps", "6", "--resume")
    assert second.returncode == 0, second.stderr
    assert read_losses(tmp_path / "parts")[-3:] == read_losses(tmp_path / "whole")[-3:]
    statistics = json.loads((tmp_path / "whole" / "features" / "features.json").read_text())
    assert [entry["feature"]["name"] for entry in statistics["item"]] == ["category", "price"]
    done = freescale("eval", tmp_path / "whole", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    own = json.loads((tmp_path / "whole" / "eval-test.json").read_text())["quality"]["model"]
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    (last,) = (entry["test"]["model"] for entry in map(json.loads, lines) if "test" in entry)
    assert own["hr@10"] == last["hr@10"] and own["cold"] == last["cold"]
    done = freescale("report", tmp_path / "whole", "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<h3>Features</h3>" in page and "5 categories" in page and "32 buckets" in page
    done = freescale("export", tmp_path / "whole", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    exported = json.loads((tmp_path / "out" / "features" / "features.json").read_text())
    assert exported == statistics
    assert (tmp_path / "out" / "table.item_features.safetensors").is_file()
    swapped = items.read_text().replace("c1", "x").replace("c2", "c1").replace("x", "c2")
    items.write_text(swapped)
    refused = freescale(*words, "--folder", tmp_path / "parts", "--steps", "9", "--resume")
    assert refused.returncode == 1 and "was saved with features" in refused.stderr


LONG = "\n".join(f"S{n},c{n},1,t" for n in range(3, 45))


@pytest.mark.parametrize(
    ("options", "items", "message"),
    [
        (["--features", "colour"], None, "column 'colour' is missing; there are columns of item: "),
        (["--features", "event.price"], None, "column 'price' is missing; there are columns of"),
        (["--features", "title"], None, "most values occur once.*title=categorical"),
        (
            ["--features", "category=numeric"],
            None,
            "row 1: column 'category' holds 'c3', not a num",
        ),
        ([], ITEMS + "S3,c,1,t\nS4,c,2,t\nS3,d,3,t\n", "rows 1 and 3: column 'sku' holds 'S3' tw"),
        (["--features", "price=vector"], None, "column 'price' holds string, not lists of numbers"),
        (
            ["--features", "channel=vector"],
            None,
            "event.channel is vector: events have features",
        ),
        ([], ITEMS + "S3,c,1,t\n,c,2,t\n", "row 2: column 'sku' is missing; fill or drop"),
        ([], ITEMS + "S3,c,1,t\nS4,d,inf,t\nS5,d,2,t\n", "row 2: column 'price' holds 'inf'"),
        ([], "code,category\nS3,c\n", "no column is recognised as the item among 'code', 'cat"),
        ([], ITEMS, "has no rows; give one with a row per item"),
        (["--features", "date=numeric,timestamp"], None, "'timestamp' is a column of every hist"),
        (["--schema", "none.toml"], None, "none.toml"),
        (["--features", "channel", "--id-dropout", "0.1"], None, "0.1 needs features of items"),
    ],
)
def test_bad_features_are_refused_by_name(tmp_path, options, items, message):
    sales, attributes = write_files(tmp_path, items)
    words = ["train", "--data", sales, "--items", attributes, "--folder", tmp_path / "run"]
    done = freescale(*words, *SMALL, "--steps", "1", "--cache", tmp_path / "cache", *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr.replace("\n", " ")), done.stderr


def test_a_feature_that_part_of_the_files_lack_is_refused(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, columns in (("a", ["channel"]), ("b", [])):
        table = {
            "user_id": np.arange(20) % 4,
            "item_id": np.arange(20),
            "timestamp": np.arange(20),
            **{column: ["web", "app"] * 10 for column in columns},
        }
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    words = ["--data", folder, "--features", "channel", "--steps", "1", "--cache", tmp_path / "c"]
    done = freescale("train", *words, *SMALL, "--folder", tmp_path / "run")
    assert done.returncode == 1
    assert "b.parquet: column 'channel', a feature, is missing" in done.stderr
    assert "add it to all files, or leave the feature out" in done.stderr


def write_recbole(folder):
    """Files as RecBole's atomic ones: the header names the type of each column."""
    random = np.random.default_rng(0)
    events = [f"{n % 30}\t{random.integers(1, 41)}\t{n}\t{n % 3} {n % 2}" for n in range(360)]
    header = "user_id:token\titem_id:token\ttimestamp:float\ttags:token_seq\n"
    (folder / "ml.inter").write_text(header + "\n".join(events) + "\n")
    genres = ["Action Comedy", "Drama", "Comedy Drama War"]
    items = [
        f"{n}\tThe Only{n}\t{1960 + n}\t{genres[n % 3]}\t{n % 4}\t{n / 7:.3f} {n % 2}"
        for n in range(1, 41)
    ]
    columns = ["item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"]
    header = "\t".join([*columns, "score:float", "embedding:float_seq"]) + "\n"
    (folder / "ml.item").write_text(header + "\n".join(items) + "\n")
    return folder / "ml.inter", folder / "ml.item"


def test_the_types_of_recbole_files_decide(tmp_path):
    events, items = write_recbole(tmp_path)
    schema = tmp_path / "features.toml"
    options = ["--items", items, "--features", "auto", "--write-schema", schema]
    code, output = run(tmp_path, "inspect", events, *options)
    assert code == 0, output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "movie_title 41 values, 0.0% missing multi" in lines
    assert "class 4 values, 0.0% missing multi" in lines
    assert "score 4 values, 0.0% missing numeric" in lines
    assert any(line.startswith("embedding 40 values") and "as lists" in line for line in lines)
    assert any(line.startswith("release_year 40 values") and "left out" in line for line in lines)
    assert any(line.endswith("left out: events have features of one value") for line in lines)
    assert not any("--features" in line and "tags" in line for line in lines)
    assert '[item.class]\nkind = "multi"\nseparator = " "\n' in schema.read_text()
    options = ["--items", items, "--features", "class=categorical,movie_title"]
    code, output = run(tmp_path, "inspect", events, *options)
    assert "class 4 values, 0.0% missing categorical" in " ".join(output.split())
    steps = ["--steps", "1", *SMALL, "--cache", tmp_path / "cache", "--folder", tmp_path / "run"]
    done = freescale("train", "--data", events, "--items", items, "--schema", schema, *steps)
    assert done.returncode == 0, done.stderr
    assert "feature item.class (multi): 4 categories, up to 3 of an item" in done.stdout


def test_a_value_that_is_not_of_the_type_in_the_header_is_refused(tmp_path):
    events, items = write_recbole(tmp_path)
    items.write_text(items.read_text().replace("\t3\t0.429 1", "\tx\t0.429 1"))
    code, output = run(tmp_path, "inspect", events, "--items", items)
    assert code == 1 and "ml.item, row 3: column 'score' holds 'x', not a number" in output


def test_a_run_keeps_its_schema(tmp_path):
    sales, items = write_files(tmp_path)
    schema = tmp_path / "features.toml"
    schema.write_text("[item.category]\nleast = 2\n\n[event.channel]\nkind = 'categorical'\n")
    words = ["train", "--data", sales, "--items", items, *SMALL, "--cache", tmp_path / "cache"]
    first = freescale(*words, "--schema", schema, "--folder", tmp_path / "run", "--steps", "2")
    assert first.returncode == 0, first.stderr
    schema.write_text(schema.read_text().replace("2", "3"))
    moved = tmp_path / "elsewhere" / "copy"
    copytree(tmp_path / "run", moved)
    resume = ["--folder", moved, "--resume", "--steps", "4"]
    refused = freescale(*words, *resume, "--schema", schema)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "was saved with features" in refused.stderr
    assert "leave --schema out: the run has it" in " ".join(refused.stderr.split())
    schema.unlink()
    rmtree(tmp_path / "run")
    second = freescale("train", *resume)
    assert second.returncode == 0, second.stderr
    done = freescale("eval", moved, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    # another copy, now that config.json names the first one
    moved = moved.rename(tmp_path / "again")
    done = freescale("eval", moved, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    done = freescale("export", moved, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    schema.write_text("# the same\n" + (moved / "features" / "schema.toml").read_text())
    third = freescale("train", "--folder", moved, "--resume", "--steps", "6", "--schema", schema)
    assert third.returncode == 0, third.stderr


def test_a_file_of_attributes_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    sales, items = write_files(tmp_path)
    read = AttributeFile.read

    def read_and_append(source, columns):
        found = read(source, columns)
        with items.open("a") as file:
            file.write("S99,c,1,t\n")
        return found

    monkeypatch.setattr(AttributeFile, "read", read_and_append)
    data = DataConfig(data=str(sales), items=str(items), cache=str(tmp_path / "cache"))
    histories = prepare_data(RunConfig(data=data))
    with pytest.raises(ValueError, match="items.csv.*changed"):
        prepare_features(data, histories, tmp_path / "cache", SplitSpec())
    assert not list((tmp_path / "cache").glob("features-*"))
