"""What users say of features: --features, schema files, and errors that name file, key and
value."""

from __future__ import annotations

import pytest

from freescale.config.features import (
    Feature,
    parse_features,
    read_schema,
    request_features,
    write_schema,
)


def test_the_short_form():
    text = "category, item.price=numeric:8,tags=multi:;,brand*color=cross:500,event.channel"
    assert parse_features(text) == (
        Feature("category", "", None, ("category",)),
        Feature("price", "item", "numeric", ("price",), buckets=8),
        Feature("tags", "", "multi", ("tags",), separator=";"),
        Feature("brand*color", "", "cross", ("brand", "color"), rows=500),
        Feature("channel", "event", None, ("channel",)),
    )
    assert parse_features("a*b")[0].kind == "cross"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price=money", "kind 'money' is none of categorical, multi, numeric, vector, cross"),
        ("price=numeric:1", "number of buckets .numeric, 2 or more"),
        ("price=numeric:few", "number of buckets"),
        ("a=cross", "a cross has two columns or more"),
        ("a*b=numeric", "a cross has two columns or more"),
        ("price=", "write a column, or column=kind"),
        ("price,price=numeric", "names 'price' twice"),
        ("timestamp", "'timestamp' is a column of every history"),
        ("category=categorical:3", "after the kind follows"),
    ],
)
def test_a_short_form_that_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_features(text)


def test_what_is_used_by_default():
    assert not request_features("", None, [])
    assert request_features("", None, ["item", "user"]).all_of == ("item", "user")
    assert request_features("auto", None, ["item"]).all_of == ("item", "event")
    assert request_features("auto", None, []).all_of == ("event",)
    assert not request_features("none", None, ["item"])
    with pytest.raises(ValueError, match="a schema lists all features"):
        request_features("price", "schema.toml", ["item"])


def test_a_schema_file_says_what_the_short_form_says(tmp_path):
    path = tmp_path / "features.toml"
    features = (
        Feature("category", "item", "categorical", ("category",), least=3),
        Feature("price in €", "item", "numeric", ("price in €",), buckets=8),
        Feature("tags", "item", "multi", ("tags",), separator=";"),
        Feature("both", "item", "cross", ("brand", 'co"lor'), rows=500),
        Feature("channel", "event", "categorical", ("channel",)),
    )
    text = write_schema(features, {"item.category": "14 values"})
    assert "# 14 values\n[item.category]\n" in text
    path.write_text(text, encoding="utf-8")
    assert read_schema(path) == features


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[item.price]\nkind = 'money'", r"\[item.price\]: kind = 'money' is none of"),
        ("[item.price]\nbins = 3", r"\[item.price\] has key 'bins', which is none of kind"),
        ("[item.price]\nkind='numeric'\nbuckets = 1", "buckets = 1 is not a number from 2 on"),
        ("[item.price]\nkind='numeric'\nbuckets = '9'", "buckets = '9' is not a number"),
        ("[item.price]\nkind='numeric'\nrows = 9", "rows = 9 is a key of kind = 'cross'"),
        ("[item.price]\nkind='cross'", "a cross has two columns or more"),
        ("[basket.age]\nkind='numeric'", r"\[basket\] is no table of features"),
        ("price = 3", r"\[price\] is no table of features"),
        ("[item]\nprice = 3", r"\[item.price\] is 3; write its keys below it"),
        ("[item.price\n", "features.toml"),
        ("", "no feature"),
    ],
)
def test_a_schema_that_is_wrong_names_file_key_and_value(tmp_path, text, message):
    path = tmp_path / "features.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_schema(path)
    assert str(path) in str(error.value)
