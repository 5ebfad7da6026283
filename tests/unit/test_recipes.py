"""Recipes: what ships, what a file of one's own may hold, and who wins."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from freescale.cli.main import main
from freescale.config import RunConfig
from freescale.config.features import parse_features
from freescale.config.recipe import list_recipes, read_recipe
from freescale.embedding.optimizers import Adam, RowWiseAdagrad, choose_row_optimizer


@pytest.fixture
def own(tmp_path):
    def write(text):
        path = tmp_path / "own.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_published_settings():
    small, large, sasrec = (
        RunConfig.from_settings({"data": "x", "recipe": name})
        for name in ("hstu-small", "hstu-large", "sasrec")
    )
    assert [c.model.layers for c in (small, large, sasrec)] == [2, 8, 2]
    assert [c.model.heads for c in (small, large, sasrec)] == [1, 2, 1]
    assert [c.model.encoder for c in (small, large, sasrec)] == ["hstu", "hstu", "sasrec"]
    for config in (small, large, sasrec):
        model, data, train = config.model, config.data, config.train
        assert (model.width, model.dropout, model.temperature) == (50, 0.2, 0.05)
        assert (data.max_length, data.negatives, data.negatives_per) == (200, 128, "position")
        assert (train.global_batch, train.epochs, train.lr, train.warmup) == (128, 101, 1e-3, 0)


def test_dlrm_v4():
    """The settings that MLPerf fixes."""
    config = RunConfig.from_settings({"data": "x", "recipe": "dlrm-v4"})
    model, data, train = config.model, config.data, config.train
    assert (model.task, config.label_names) == ("ranking", ("listen_plus",))
    assert config.task_weights == {"listen_plus": 0.2}
    assert (model.width, model.layers, model.heads, data.max_length) == (512, 3, 4, 4086)
    assert (model.dropout, model.input_dropout, data.candidates) == (0.1, 0.2, 1)
    assert data.max_length + 8 + data.candidates <= 4096 and data.max_length // 3 == 1362
    features = parse_features(data.features)
    assert [feature.name for feature in features[:3]] == ["artist", "album", "user"]
    sizes = {feature.name: feature.rows for feature in features}
    assert (data.num_items, sizes["artist"], sizes["album"]) == (9_390_624, 1_293_395, 3_367_692)
    assert sum(sizes.values()) + data.num_items == 293_051_712
    assert list(sizes)[2:] == [
        *("user", "user*artist", "user*album", "user*hour", "item*hour", "artist*hour"),
        *("user*is_organic", "user*artist*hour"),
    ]
    optimizer = choose_row_optimizer(train)
    assert optimizer == RowWiseAdagrad(lr=train.lr, eps=1e-8)
    assert train.lr == 1e-6 * train.global_batch / 8192
    assert (train.beta1, train.beta2, train.clip, train.weight_decay) == (0.95, 0.999, 1.0, 0.0)
    assert (train.warmup, train.decay, train.seed) == (24_000, "constant", 1)


def test_the_settings_of_moments_reach_the_optimizers():
    given = {"data": "x", "beta1": 0.8, "beta2": 0.7, "row_eps": 1e-3}
    train = RunConfig.from_settings(given).train
    assert choose_row_optimizer(train) == Adam(lr=train.row_lr, betas=(0.8, 0.7), eps=1e-3)
    with pytest.raises(ValueError, match="--row-eps 0.001 with --row-optimizer sgd"):
        choose_row_optimizer(RunConfig.from_settings(given | {"row_optimizer": "sgd"}).train)


def test_full_softmax():
    config = RunConfig.from_settings({"data": "x", "recipe": "hstu-softmax"})
    model, data, train = config.model, config.data, config.train
    assert (data.negatives_from, data.negatives, data.max_length) == ("all", None, 200)
    assert (model.encoder, model.width, model.heads, model.dropout) == ("hstu", 64, 2, 0.5)
    assert (model.temperature, train.global_batch, train.decay) == (0.2, 16, "linear")


def test_given_options_win_and_the_run_remembers():
    given = {"data": "x", "recipe": "hstu-small", "layers": 3, "epochs": None}
    config = RunConfig.from_settings(given)
    assert (config.model.layers, config.train.epochs, config.model.width) == (3, 101, 50)
    again = RunConfig.from_json(config.to_json())
    assert again == config and json.loads(config.to_json())["model"]["recipe"] == "hstu-small"
    # a resumed run has its own values: the recipe is not read again
    resumed = RunConfig.from_settings({"layers": None, "recipe": None, "epochs": 102}, again)
    assert (resumed.model.layers, resumed.train.epochs) == (3, 102)
    assert resumed.model.recipe == "hstu-small"


def test_a_file_of_one_s_own(own):
    path = own('description = "mine"\nlr = 1\nmax-length = 7\nshuffle = false\n')
    assert read_recipe(path).description == "mine"
    config = RunConfig.from_settings({"data": "x", "recipe": path})
    assert (config.train.lr, config.data.max_length, config.data.shuffle) == (1.0, 7, False)
    assert isinstance(config.train.lr, float) and config.model.recipe == path


@pytest.mark.parametrize(
    "text, message",
    [
        ("widht = 3", r"own.toml: 'widht' is no option .*did you mean 'width'"),
        ("recipe = 'sasrec'", "own.toml: 'recipe' is no option"),
        ("[model]\nwidth = 3", "own.toml: 'model' is no option"),
        ("width = '3'", "own.toml: 'width' must be of type int, not '3'"),
        ("width = true", "own.toml: 'width' must be of type int, not True"),
        ("width = 0", "own.toml: --width must be at least 1"),
        ("encoder = 'sasrec'\ntime_bias = true", "own.toml: --encoder sasrec has no --time-bias"),
        ("max_length = 3\nmax-length = 4", "own.toml: 'max-length' is there twice"),
        ("width = \nheads = 1", "own.toml: not valid TOML: .*line 1"),
        ("description = 3", "own.toml: description must be"),
    ],
)
def test_mistakes_in_a_file(own, text, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(own(text))


def test_there_is_none_of_that_name():
    with pytest.raises(ValueError, match="no recipe 'hstu'; the package has dlrm-v4, hstu-la"):
        read_recipe("hstu")
    with pytest.raises(ValueError, match="no file hstu.toml"):
        read_recipe("hstu.toml")


def test_list():
    done = CliRunner().invoke(main, ["train", "--recipe", "list"])
    lines = done.output.splitlines()
    assert done.exit_code == 0 and len(lines) == len(list_recipes()) == 5
    for line, recipe in zip(lines, list_recipes(), strict=True):
        assert line.split()[0] == recipe.name and line.endswith(recipe.description)
        assert len(line) <= 100 and recipe.description
