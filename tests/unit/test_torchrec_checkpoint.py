"""Checkpoints of TorchRec's sharded models, read and written back: both sides go on from them and
stay together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

pytest.importorskip("torchrec")

from helpers.ranks import run_ranks  # noqa: E402
from helpers.torchrec_cases import build_dlrm, dlrm_batch  # noqa: E402
from helpers.training import gather_tables  # noqa: E402
from torchrec.datasets.utils import Batch  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.sharding_plan import (  # noqa: E402
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor  # noqa: E402

import freescale  # noqa: E402
from freescale.torchrec import load_checkpoint, save_checkpoint  # noqa: E402

PATH = "model.sparse_arch.embedding_bag_collection"
BAGS = f"{PATH}.embedding_bags"
LR, DENSE_LR = 0.05, 0.1


class Theirs:
    """DLRM, sharded by TorchRec."""

    def __init__(self, kind=RowWiseAdagrad, placements=None) -> None:
        model, world = build_dlrm(), dist.get_world_size()
        apply_optimizer_in_backward(kind, model.model.sparse_arch.parameters(), {"lr": LR})
        placements = placements or [row_wise()] * 4
        plan = construct_module_sharding_plan(
            model.get_submodule(PATH),
            {f"t{number}": each for number, each in enumerate(placements)},
            sharder=EmbeddingBagCollectionSharder(),
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan({PATH: plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda p: torch.optim.Adagrad(p, lr=DENSE_LR),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def step(self, batch) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch)[0]
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder) -> None:
        dcp.save({"job": self.state_dict(), "epoch": 3}, checkpoint_id=folder)

    def load(self, folder) -> None:
        state = self.state_dict()
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Ours:
    def __init__(self, transport=None, row=None, placement="sharded") -> None:
        row = row or freescale.RowWiseAdagrad(lr=LR, eps=1e-8)
        self.model = freescale.torchrec.parallelize(
            build_dlrm(), row, transport=transport, placement=placement
        )
        self.optimizer = torch.optim.Adagrad(self.model.dense_parameters(), lr=DENSE_LR)
        self.pipeline = freescale.torchrec.Pipeline(self.model, self.optimizer)

    def step(self, batch) -> float:
        """Returns the loss over all ranks."""
        (result,) = self.pipeline.run([batch])
        return result.loss

    def load(self, source, **options) -> None:
        load_checkpoint(source, self.model, self.optimizer, **options)

    def gather(self):
        """Weights, by TorchRec's names."""
        tables = {
            name.replace("/rows", ".weight"): value
            for name, value in gather_tables(self.model).items()
            if name.endswith("/rows")
        }
        dense = self.model.module.model.named_parameters()
        return tables | {name: value.detach().clone() for name, value in dense}


def join(batches) -> Batch:
    """The samples of several batches in one."""
    keys = batches[0].sparse_features.keys()
    parts = {
        key: JaggedTensor(
            torch.cat([each.sparse_features[key].values() for each in batches]),
            lengths=torch.cat([each.sparse_features[key].lengths() for each in batches]),
        )
        for key in keys
    }
    return Batch(
        torch.cat([each.dense_features for each in batches]),
        KeyedJaggedTensor.from_jt_dict(parts),
        torch.cat([each.labels for each in batches]),
    )


def read_weights(folder):
    """Of a checkpoint, by torch's own means: {name: tensor}."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = {
        name: torch.empty(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if "optimizer." not in name and hasattr(entry, "size")
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix("job.").removeprefix("model."): t for name, t in found.items()}


def assert_near(actual, expected):
    assert len(actual) == len(expected)
    for name, value in expected.items():
        name = name if name in actual else f"model.{name}"
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-6, msg=name)


# t3 is trained by the dense optimizer there: data-parallel tables are
MIXED = {f"t{number}": freescale.RowWiseAdagrad(lr=LR, eps=1e-8) for number in range(3)} | {
    "t3": freescale.Adagrad(lr=DENSE_LR, eps=1e-10)
}


def go_to_and_fro(transport, folder):
    def agree(loss):
        total = torch.tensor([loss], dtype=torch.float64)
        transport.all_reduce(total, "dense").wait()
        return total.item() / transport.world

    rank, batches = transport.rank, [dlrm_batch(seed) for seed in range(8)]
    placements = [row_wise(), row_wise(), table_wise(rank=1), data_parallel()]
    theirs = Theirs(placements=placements)
    for number in range(2):
        theirs.step(batches[2 * number + rank])
    theirs.save(f"{folder}/theirs")
    expected = agree(theirs.step(batches[4 + rank]))
    theirs.save(f"{folder}/theirs-after")
    ours = Ours(transport, MIXED, {f"t{n}": "sharded" for n in range(3)} | {"t3": "replicated"})
    ours.load(f"{folder}/theirs")
    assert ours.step(batches[4 + rank]) == pytest.approx(expected, abs=1e-6)
    save_checkpoint(f"{folder}/ours", ours.model, ours.optimizer)
    # back: another job of theirs, with another sharding
    again = Theirs(placements=[table_wise(rank=0), row_wise(), row_wise(), data_parallel()])
    again.load(f"{folder}/ours")
    expected = ours.step(batches[6 + rank])
    assert agree(again.step(batches[6 + rank])) == pytest.approx(expected, abs=1e-6)
    again.save(f"{folder}/again")
    weights = ours.gather()
    return (expected, weights) if rank == 0 else None


def test_torchrec_on_two_ranks_goes_on_here_and_back(tmp_path):
    batches = [dlrm_batch(seed) for seed in range(8)]
    expected, weights = run_ranks(2, go_to_and_fro, str(tmp_path))[0]
    assert_near(weights, read_weights(tmp_path / "again"))
    alone = Ours(row=MIXED)
    alone.load(tmp_path / "theirs")
    alone.step(join(batches[4:6]))
    assert_near(alone.gather(), read_weights(tmp_path / "theirs-after"))
    assert_near(alone.gather(), read_weights(tmp_path / "ours"))
    from_ours = Ours(row=MIXED)
    from_ours.load(str(tmp_path / "ours"))
    assert from_ours.step(join(batches[6:8])) == pytest.approx(expected, abs=1e-6)
    assert_near(from_ours.gather(), weights)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FUSED = {
    "sgd": (torch.optim.SGD, freescale.SGD(lr=LR)),
    "adagrad": (torch.optim.Adagrad, freescale.Adagrad(lr=LR, eps=1e-8)),
    "row-wise adagrad": (RowWiseAdagrad, freescale.RowWiseAdagrad(lr=LR, eps=1e-8)),
}


@pytest.mark.parametrize("name", FUSED)
def test_states_of_fused_optimizers(process_group, tmp_path, name):
    kind, row = FUSED[name]
    theirs, ours = Theirs(kind), Ours(row=row)
    theirs.step(dlrm_batch(0))
    theirs.save(tmp_path / "theirs")
    ours.load(tmp_path / "theirs")
    assert ours.step(dlrm_batch(1)) == pytest.approx(theirs.step(dlrm_batch(1)), abs=1e-6)
    save_checkpoint(tmp_path / "ours", ours.model, ours.optimizer)
    again = Theirs(kind)
    again.load(tmp_path / "ours")
    again.step(dlrm_batch(2))
    theirs.step(dlrm_batch(2))
    theirs.save(tmp_path / "two")
    again.save(tmp_path / "three")
    assert_near(read_weights(tmp_path / "two"), read_weights(tmp_path / "three"))


def test_weights_of_column_wise_tables_but_not_their_sums(process_group, tmp_path):
    theirs, ours = Theirs(placements=[column_wise(ranks=[0, 0])] * 4), Ours()
    theirs.step(dlrm_batch(0))
    theirs.save(tmp_path / "theirs")
    load_checkpoint(tmp_path / "theirs", ours.model)
    assert_near(ours.gather(), read_weights(tmp_path / "theirs"))
    with pytest.raises(ValueError, match=r"t0\.momentum1' has shape \[100\] there and \[50\] here"):
        ours.load(tmp_path / "theirs")


def save_plain(path, kind, batch, **more):
    """An unsharded model after a step, its tables trained by an optimizer that is no kernel; and
    the weights after another step."""
    model = build_dlrm()
    named = dict(model.named_parameters())
    tables = {name: p for name, p in named.items() if "embedding_bags" in name}
    dense = {name: p for name, p in named.items() if name not in tables}
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper(tables, lambda p: kind(p, lr=LR, eps=1e-8)),
            KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=DENSE_LR)),
        ]
    )
    for _ in range(2):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()} | more
        torch.save(state, path)
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("name", ["row-wise adagrad", "adam"])
def test_plain_state_dicts(tmp_path, name, as_file):
    kind, row = {
        "row-wise adagrad": FUSED["row-wise adagrad"],
        "adam": (torch.optim.Adam, freescale.Adam(lr=LR, betas=(0.9, 0.999), eps=1e-8)),
    }[name]
    # every row is read: torch's Adam changes those that are not, too
    batch = join([dlrm_batch(seed, samples=60) for seed in range(10)])
    expected = save_plain(tmp_path / "file", kind, batch, epoch=3)
    ours = Ours(row=row)
    ours.load(tmp_path / "file" if as_file else torch.load(tmp_path / "file"))
    ours.pipeline.load_state_dict({"steps": 1})
    ours.step(batch)
    assert_near(ours.gather(), expected)


def test_fused_adam_is_written_as_fused_kernels_have_it(tmp_path):
    """Fused kernels have no Adam on CPUs: names and shapes are compared with those of CUDA's."""
    ours = Ours(row=freescale.Adam(lr=LR))
    ours.step(dlrm_batch(0))
    save_checkpoint(tmp_path / "ours", ours.model, ours.optimizer)
    entries = dcp.FileSystemReader(tmp_path / "ours").read_metadata().state_dict_metadata
    key = f"optimizer.state.{BAGS}.t1.weight.t1"
    assert entries[f"{key}.momentum1"].size == entries[f"{key}.exp_avg_sq"].size == (51, 8)
    again = Ours(row=freescale.Adam(lr=LR))
    again.load(tmp_path / "ours")
    states = gather_tables(ours.model)
    assert any("/second" in name and value.abs().sum() for name, value in states.items())
    for name, value in gather_tables(again.model).items():
        assert torch.equal(value, states[name]), name


def edit(**changes):
    def change(state):
        for name, value in changes.items():
            part, key = name.split("__")
            found = (
                state[part]["state"][f"{BAGS}.t1.weight"] if part == "optimizer" else state[part]
            )
            key = key.replace("T1", f"{BAGS}.t1.weight")
            if value is None:
                del found[key]
            else:
                found[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(model__T1=None), r"no 'model\..*t1.weight'"),
        (edit(model__T1=torch.zeros(51, 9)), r"t1.weight' has shape \[51, 9\] there and \[51, 8\]"),
        (edit(model__more=torch.zeros(1)), "'model.more', which the model has not"),
        (edit(optimizer__sum=None), "no 't1.momentum1', which RowWiseAdagrad of table 't1' keeps"),
        (edit(optimizer__sum=torch.zeros(51, 8)), r"shape \[51, 8\] there and \[51\] here"),
        (edit(optimizer__row_counter=torch.zeros(51)), "'row_counter', a state of table 't1'"),
        (lambda state: state.update(ema=state["model"]), "behind 'ema.' and 'model.': name one"),
        (lambda state: state.update(old=state["optimizer"]), "twice"),
        (lambda state: state["optimizer"].clear(), "which RowWiseAdagrad of table 't0' keeps"),
        (lambda state: state["model"].clear(), "it has no '"),
    ],
)
def test_refused_by_name(tmp_path, change, message):
    save_plain(tmp_path / "file", RowWiseAdagrad, dlrm_batch(0))
    state = torch.load(tmp_path / "file")
    change(state)
    ours = Ours()
    with pytest.raises(ValueError, match=message):
        ours.load(state)
    assert not ours.model.tables.placed  # no memory was taken


def test_another_dense_optimizer_is_refused(tmp_path):
    save_plain(tmp_path / "file", RowWiseAdagrad, dlrm_batch(0))
    ours = Ours()
    dense = list(ours.model.dense_parameters())
    with pytest.raises(ValueError, match="no 'exp_avg' of '.*', which Adam keeps"):
        load_checkpoint(tmp_path / "file", ours.model, torch.optim.Adam(dense))
    with pytest.raises(ValueError, match="'optimizer.state.*', a state which SGD does not keep"):
        load_checkpoint(tmp_path / "file", ours.model, torch.optim.SGD(dense))


def test_the_snippet_of_the_page(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "start" / "from_torchrec.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    ours, again = Ours(), Ours()
    ours.step(dlrm_batch(0))
    save_checkpoint("checkpoints/1000", ours.model, ours.optimizer)
    exec(snippet, {"freescale": freescale, "model": again.model, "optimizer": again.optimizer})
    trained = ours.gather()
    assert all(torch.equal(value, trained[name]) for name, value in again.gather().items())
    assert (tmp_path / "checkpoints" / "2000" / ".metadata").exists()


def test_writing_refuses_what_is_there(tmp_path):
    ours = Ours()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder is there already"):
        save_checkpoint(tmp_path / "folder", ours.model)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="could not be written"):
        save_checkpoint(tmp_path / "file" / "below", ours.model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_part_of_a_sharded_model_is_refused(process_group):
    with pytest.raises(ValueError, match="is a ShardedTensor, and a rank has only a part"):
        Ours().load(Theirs().state_dict())
