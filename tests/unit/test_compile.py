"""Kernels compiled beforehand: what is found covers what a run launches, and a launch of a compiled
kernel hands it the right arguments. No GPU, no interpreter: launches are recorded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.kernels.jit import compile_worker, launch
from freescale.kernels.jit.compile import (
    compile_recorded,
    compile_versions,
    find_versions,
    list_kernel_modules,
    preload,
)
from freescale.kernels.jit.compile_worker import Version, compute_keys
from freescale.kernels.jit.launch import identify_launch, launch_kernel, record_launches
from freescale.kernels.jit.launch_plan import Block
from freescale.models.features import FeatureTables
from freescale.random import derive
from freescale.train.build import build_model, build_module
from freescale.train.compile_kernels import add_features, call_kernels, call_model
from freescale.train.device_figures import describe_source, watch_compilations
from freescale.train.state.contents import follow_changes
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton exists for Linux alone"
)
H200 = ("cuda", 90, 32)
CPU = torch.device("cpu")


def configure(task="retrieval", per="sample", in_batch_share=0.0, **changes):
    model = dict(width=64, layers=3, heads=2, dropout=0.2, task=task, labels="click") | changes
    return RunConfig(
        data=DataConfig(
            data="synthetic",
            negatives=8,
            max_length=40,
            negatives_per=per,
            in_batch_share=in_batch_share,
        ),
        model=ModelConfig(**model),
        train=TrainConfig(precision="bf16"),
    )


def draw_batch(config, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda bound, *shape: torch.randint(0, bound, shape, generator=generator)  # noqa: E731
    # by 1 and by multiples of 16 Triton would specialise
    lengths, counts = {
        2: (torch.ones(1, dtype=torch.int64),) * 2,
        3: (torch.full((16,), 16),) * 2,
    }.get(seed, (draw(40, 3 + seed), draw(4, 3 + seed)))
    samples = len(lengths)
    events, candidates = int(lengths.sum()), int(counts.sum())
    scale = 10 ** (3 + 4 * (seed % 2))  # times in 32 and in 64 bits
    more = {}
    if config.data.negatives_per == "position":
        more["negatives"] = Jagged(draw(50, events, config.data.negatives), lengths)
    columns = {}
    if config.data.in_batch_share:  # which is corrected for
        more["targets_log_q"] = Jagged(torch.zeros(events), lengths)
        columns = {"negatives_log_q": torch.zeros(samples, config.data.negatives)}
    return SequenceBatch(
        sequences={
            **more,
            "history": Jagged(draw(50, events), lengths),
            "targets": Jagged(draw(50, events), lengths),
            "timestamps": Jagged((draw(900, events) * scale).cumsum(0), lengths),
            "candidate_timestamps": Jagged(draw(900, candidates) * scale, counts),
            "labels": Jagged(draw(2, candidates, 1), counts),
        },
        candidates={
            "candidates": Nested(draw(50, candidates), torch.ones_like(draw(1, candidates)), counts)
        },
        **{
            "sample": lambda count: {"dense": {"negatives": draw(50, samples, count)} | columns},
            "batch": lambda count: {"shared": {"negatives": draw(50, count)}},
            "position": lambda count: {},
        }[config.data.negatives_per](config.data.negatives),
        keys=derive(seed, torch.arange(samples)),
    ).check()


@pytest.mark.parametrize(
    "task, changes",
    [
        ("retrieval", {"position_bias": False, "time_bias": False}),
        ("retrieval", {"position_bias": True, "time_bias": True}),
        ("ranking", {"position_bias": True, "time_bias": False, "dropout": 0.0}),
        ("retrieval", {"in_batch_share": 0.5, "position_bias": False, "time_bias": False}),
        ("retrieval", {"per": "position", "position_bias": False, "time_bias": False}),
        (
            "retrieval",
            {"per": "batch", "position_bias": False, "time_bias": False, "recompute": True},
        ),
        ("retrieval", {"attend": "first=4,last=8"}),
        ("ranking", {"encoder": "sasrec", "attend": "last=8"}),
        ("retrieval", {"encoder": "sasrec", "dropout": 0.0}),
    ],
)
def test_what_is_compiled_covers_what_a_run_launches(task, changes):
    config = configure(task, **changes)
    with record_launches() as beforehand:
        call_kernels(config, False, CPU)
    module = build_module(config, 50, 0)
    module.item = torch.nn.Embedding(50, 64)
    with record_launches() as needed:
        for seed in range(4):
            batch = draw_batch(config, seed)
            call_model(module, batch, config, CPU)
            if len(batch) > 1:  # the first batch is checked in parts, which begin anywhere
                call_model(module, batch.slice(1, len(batch)), config, CPU)
    assert len(needed) > 50 and not list_missing(needed, beforehand)
    # one of those that are alike stands for all
    different = {identify_launch(launch): launch for launch in beforehand}.values()
    assert len(different) < len(beforehand) and not list_missing(beforehand, different)


class SomeFeatures:
    """Features of every kind, as a run has them."""

    item_rows, event_rows, user_rows, context_rows = 50, 50, 50, 50
    user_places, vector_widths = (1, 2), (24,)
    item_places = context_places = 2


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_what_is_compiled_covers_features(task):
    config = configure(task, position_bias=True, time_bias=False)
    with record_launches() as beforehand:
        call_kernels(config, False, CPU, SomeFeatures())
    tables = FeatureTables(50, 50, 50, (1, 2), [torch.randn(51, 24).half()], 50)
    module = build_module(config, 50, 0, tables)
    for name in ("item", "item_features", "event_features", "user_features", "context_features"):
        setattr(module, name, torch.nn.Embedding(50, 64))
    with record_launches() as needed:
        for seed in range(4):
            batch = add_features(draw_batch(config, seed), tables, task)
            call_model(module, batch, config, CPU)
    with record_launches() as plain:
        call_kernels(config, False, CPU)
    assert len(needed) > 50 and not list_missing(needed, beforehand)
    assert list_missing(needed, plain)  # those of the prefix


class FeaturesOfDlrm(SomeFeatures):
    event_rows, user_rows, user_places, vector_widths = 0, 0, (), ()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_what_is_compiled_covers_a_dlrm(dropout):
    config = configure("ranking", head="dlrm", dropout=dropout)
    config = replace(config, data=replace(config.data, candidates=1))
    with record_launches() as beforehand:
        call_kernels(config, True, CPU, FeaturesOfDlrm())
    tables = FeatureTables(50, context=50, item_places=2, context_places=2)
    module = build_module(config, 50, 4, tables)
    for name in ("item", "item_features", "context_features"):
        setattr(module, name, torch.nn.Embedding(50, 64))
    with record_launches() as needed:
        for seed in range(4):
            batch = draw_batch(config, seed)
            actions = replace(batch.sequences["history"], values=batch.values("history") % 4)
            columns = {**batch.sequences, "actions": actions}
            batch = add_features(replace(batch, sequences=columns), tables, "ranking")
            call_model(module, batch, config, CPU)
    found = {describe_source(version.build_source()) for version in find_versions(needed, H200)}
    for kernel in ("gate_kernel", "add_encodings_kernel", "layer_norm_kernel"):
        assert any(each.startswith(kernel) for each in found), found
    assert not list_missing(needed, beforehand)


def list_missing(needed, beforehand):
    ready = {repr(version) for version in find_versions(beforehand, H200)}
    missing = [v for v in find_versions(needed, H200) if repr(v) not in ready]
    return [describe_source(version.build_source()) for version in missing]


@pytest.mark.parametrize("full_every", [1, 20])  # with 20 changed rows are marked
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_what_is_compiled_covers_the_tables_of_one_rank(optimizer, full_every):
    """The calls of its schedule: the head reads a copy of the rows, the encoder the table."""
    config = configure(position_bias=False, time_bias=False)
    train = replace(config.train, row_optimizer=optimizer, full_every=full_every)
    config = replace(config, train=train)
    with record_launches() as beforehand:
        call_kernels(config, False, CPU)
    sizes = SimpleNamespace(num_items=50, num_actions=0, features=None)
    model = build_model(config, sizes, LocalTransport())
    tables = model.tables
    with record_launches() as needed:
        for seed in range(4):
            batch = draw_batch(config, seed)
            if not tables.placed:
                tables.place(batch)
            if seed == 2 and full_every > 1:  # the first of them is saved
                follow_changes(tables, "checkpoints")
            rows = tables.local.fetch(tables.local.request([batch]))
            tables.open(rows)
            with torch.autocast("cpu", torch.bfloat16):
                losses = model.module.train()(batch)
            losses["next_item"].backward()
            tables.local.apply(rows, step=1 + seed, clip=None)
    assert len(needed) > 50 and not list_missing(needed, beforehand)


def test_a_worker_compiles_and_a_second_run_finds_it(tmp_path, monkeypatch):
    from freescale.kernels.requests.triton_kernels import flags_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keys = torch.arange(5)
    with record_launches() as launches:
        for n in (5, 1, 16):  # the count does not select a version
            launch_kernel(flags_kernel, (1,), keys, keys.int(), n, BLOCK=1024, num_warps=4)
    versions, told = find_versions(launches, H200), []
    assert len(launches) == 3 and len(versions) == 1
    assert compile_versions(versions, lambda *progress: told.append(progress)) == 1
    assert told == [(0, 1), (1, 1)] and compile_versions(versions) == 0
    list_compiled = watch_compilations()
    versions[0].compile()
    assert list_compiled() == []  # from the cache
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    versions[0].compile()
    assert list_compiled() == [
        "flags_kernel(keys: *i64 / 16, flags: *i32 / 16, n: i32, BLOCK=1024)"
    ]


def find_keys(kernels):
    """Triton's cache keys of attention kernels (module, name), as a process finds them that meets
    them in this order."""
    compute_keys.cache_clear()
    for module in {module for module, _ in kernels}:
        for kernel in vars(module).values():
            if hasattr(kernel, "used_global_vals"):
                kernel.hash, kernel.used_global_vals = None, {}
    versions = [Version(module.__name__, name, {}, {}, {}, {}, ()) for module, name in kernels]
    return {version.name: version.build_source().fn.cache_key for version in versions}


def test_a_kernel_has_the_same_key_whatever_was_compiled_before_it():
    """Of kernels that call one another, in their own module and in another: Triton alone gives
    other keys in another order."""
    from freescale.kernels.attention import triton_bias_kernels as attention_bias_kernels
    from freescale.kernels.attention import triton_kernels as attention_kernels

    names = ["forward_kernel", "_add_values", "_half_scores", "_load_tile", "backward_q_kernel"]
    kernels = [(attention_kernels, name) for name in names]
    kernels += [(attention_bias_kernels, name) for name in ("pair_bias_kernel", "_find_pairs")]
    assert find_keys(kernels) == find_keys(kernels[::-1])


@dataclass
class _Parameter:
    is_constexpr: bool
    do_not_specialize: bool
    do_not_specialize_on_alignment: bool = False


class FakeKernel:
    """Has of a Triton kernel what the launcher reads; counts what Triton would compile."""

    arg_names = ("x", "blocks", "scale", "n", "kind", "C")
    pre_run_hooks = ()
    fn = SimpleNamespace(__module__="freescale.kernels.requests.triton_kernels")

    def __init__(self):
        flags = [(False, name == "n") for name in self.arg_names[:-1]] + [(True, False)]
        self.params = [_Parameter(c, f) for c, f in flags]
        self.made, self.direct = [], []

    def __getitem__(self, grid):
        def launch_by_triton(*arguments, **named):
            self.made.append((grid, arguments, named))
            return SimpleNamespace(
                run=lambda *given: self.direct.append(given), function=7, packed_metadata="packed"
            )

        return launch_by_triton

    def run(self, *values, grid, warmup, **options):
        assert warmup
        self.made.append((grid, values, options))


@pytest.fixture
def unknown_triton(monkeypatch):
    """A version after those that are known, without what `launch` and `compile` take from it."""
    import triton
    from triton.runtime import cache, jit

    compile_worker.read_version.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    monkeypatch.delattr(cache, "triton_key")
    monkeypatch.delattr(cache, "get_cache_key")
    monkeypatch.delattr(jit, "create_function_from_signature")
    yield
    compile_worker.read_version.cache_clear()


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    yield (kernel := FakeKernel())
    launch._launchers.pop(id(kernel), None)


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
class TestLaunch:
    def start(self, kernel, x, n=3, kind=None, C=4, rows=16):
        aligned = torch.zeros(4, 16, dtype=x.dtype)
        block = Block(aligned, [4, 16], [16, 1], [rows, 16])
        launch_kernel(kernel, (5, 2), x, block, 0.5, n=n, kind=kind, C=C, num_warps=4)
        return block

    def test_the_second_launch_is_direct(self, kernel):
        x = torch.zeros(4, 16)
        self.start(kernel, x)
        assert len(kernel.made) == 1 and not kernel.direct
        other = torch.zeros(8, 16)
        block = self.start(kernel, other, n=10**6)  # neither address nor count matter
        assert len(kernel.made) == 1
        (given,) = kernel.direct
        assert given[:9] == (5, 2, 1, 99, 7, "packed", None, None, None)
        assert given[9:] == (other.data_ptr(), block, 0.5, 10**6, None, 4)

    def test_an_unknown_triton_compiles_and_launches_itself(self, kernel, unknown_triton):
        x = torch.zeros(4, 16)
        preload()
        assert compile_recorded(lambda: self.start(kernel, x)) == 0
        assert len(kernel.made) == 1  # compiled by Triton's own warm-up
        for launches in (2, 3):
            self.start(kernel, x)
            assert len(kernel.made) == launches and not kernel.direct

    @pytest.mark.parametrize("given, taken", [({}, True), ({"enable_fp_fusion": False}, False)])
    def test_no_launch_leaves_fusion_to_triton(self, kernel, given, taken):
        arguments = (torch.zeros(4, 16), None, 0.5, 3, None, 4)
        with record_launches() as recorded:
            launch_kernel(kernel, (1,), *arguments, **given)
        launch_kernel(kernel, (1,), *arguments, **given)
        ((_, _, named),) = kernel.made
        assert recorded[0].options["enable_fp_fusion"] is named["enable_fp_fusion"] is taken

    def test_a_thread_records_its_own_launches_alone(self, kernel):
        x = torch.zeros(4, 16, requires_grad=True)

        class Read(torch.autograd.Function):
            @staticmethod
            def forward(ctx, values):
                return values.clone()

            @staticmethod
            def backward(ctx, grad):
                self.start(kernel, grad)
                return grad

        with record_launches() as recorded:
            other = threading.Thread(target=self.start, args=(kernel, torch.zeros(4, 16)))
            other.start()
            other.join()
            assert len(kernel.made) == 1 and not recorded
            Read.apply(x).sum().backward()
        assert len(kernel.made) == 1 and len(recorded) == 1

    def test_what_triton_compiles_anew_is_not_direct(self, kernel):
        x = torch.zeros(4, 16)
        self.start(kernel, x)
        for changed in (
            dict(C=8),
            dict(n=2**40),
            dict(kind=x),
            dict(rows=32),
            dict(x=x.to(torch.bfloat16)),
            dict(x=torch.zeros(65)[1:].view(4, 16)),  # not aligned
        ):
            made = len(kernel.made)
            self.start(kernel, **({"x": x} | changed))
            assert len(kernel.made) == made + 1, changed
        assert not kernel.direct

    def test_a_profiler_of_triton_sees_each(self, kernel, monkeypatch):
        from triton import knobs

        x = torch.zeros(4, 16)
        self.start(kernel, x)
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
        self.start(kernel, x)
        assert len(kernel.made) == 2 and not kernel.direct


TMA = dict(swizzle=3, elem_size=4, elem_type=0, block_size=[16, 16], fp4_padded=False)


@pytest.mark.parametrize("descriptors", [[], [TMA]], ids=["plain", "tma"])
def test_the_installed_triton_takes_addresses_and_blocks(monkeypatch, descriptors):
    """Its launcher gives the driver the same as for tensors and for descriptors of its own."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    calls = []
    fill = lambda address, *described: (address, *map(str, described))  # noqa: E731
    utils = SimpleNamespace(
        launch=lambda *given: calls.append(given),
        fill_tma_descriptor=fill,  # Triton 3.6
        fill_tma_descriptor_tiled=fill,
        build_signature_metadata=str,
    )
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    # Triton 3.6 compiles a module for each signature, and links the GPU's driver to it.
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **kind: str(kind), raising=False)
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: utils, raising=False)
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    flags = dict.fromkeys(("launch_cooperative_grid", "launch_pdl"), False)
    metadata = SimpleNamespace(**sizes, **aligned, **flags, tensordesc_meta=descriptors)
    signature = {"x": "*fp32", "block": "tensordesc<fp32[16, 16]>", "n": "i32", "C": "constexpr"}
    source = SimpleNamespace(signature=signature, constants={(3,): 4}, fn=FakeKernel())
    run = nvidia.CudaLauncher(source, metadata)
    x = torch.zeros(64, 16)
    block = Block(x, [64, 16], [16, 1], [16, 16])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    launch._run(0, (5, 2), (run, 7, "packed"), (x.data_ptr(), block, 3, 4))
    run(5, 2, 1, 99, 7, "packed", None, None, None, x, launch.describe_block(block), 3, 4)
    ours, theirs = (flatten(call) for call in calls)
    assert ours == theirs and {5, 2, 99, 7, "packed", x.data_ptr(), 64, 3} <= set(ours)


def flatten(values):
    """Nested tuples and lists as one list, and tensors as their addresses."""
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in flatten(value)]
    return [values.data_ptr() if torch.is_tensor(values) else values]


def list_variants():
    """Values that an argument could have. Some of them make no sense to a kernel: they are told
    apart before it is compiled."""
    tensors = [torch.zeros(8, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    integers = [1, 2, 16, 17, 64, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40]
    return [None, True, 0.5, *integers, *tensors, *(tensor[1:] for tensor in tensors)]


@pytest.mark.parametrize(
    "module, name", [("triton_missing", "claim"), ("triton_missing", "order"), ("triton", "put_in")]
)
def test_keys_differ_wherever_triton_compiles_differently(module, name):
    """Of launches that differ in one argument, among them tensors that may lie anywhere, and
    integers that Triton specialises and others."""
    kernels = importlib.import_module(f"freescale.kernels.id_map.{module}_kernels")
    kernel = getattr(kernels, f"{name}_kernel")
    launcher, told_apart = launch._find_launcher(kernel), 0
    tensor = torch.zeros(8, dtype=torch.int64)
    first = [
        64 if each.is_constexpr else 3 if each.do_not_specialize else tensor
        for each in kernel.params
    ]

    def describe(values, warps):
        with record_launches() as launches:
            launch_kernel(kernel, (1,), *values, num_warps=warps)
        (made,) = launches
        key, handed = launcher._find_plan(made.values).build_key(0, made.options, made.values)
        assert handed == tuple(v.data_ptr() if torch.is_tensor(v) else v for v in values)
        return repr(find_versions(launches, H200)), (tuple(map(type, values)), key)

    assert describe(first, 4)[1] != describe(first, 8)[1]
    for number in range(len(first)):
        if kernel.params[number].is_constexpr:
            continue
        found = {}
        for other in list_variants():
            version, key = describe([*first[:number], other, *first[number + 1 :]], 4)
            assert found.setdefault(key, version) == version, (number, other)
        told_apart += len(found)
    assert told_apart < len(first) * len(list_variants())  # it does not all differ


def test_processes_that_compile_import_no_torch():
    """It would take each of them longer than a kernel does."""
    names = list_kernel_modules()
    assert len(names) > 10
    program = (
        f"import sys, {', '.join(names)}, {compile_worker.__name__}; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_what_is_forked_has_all_kernels():
    """And their keys, without having asked for a GPU."""
    code = """
import sys, torch
from freescale.launch.rank_process import preload
preload()
from triton import JITFunction
from freescale.kernels.jit.compile import list_kernel_modules
names = list_kernel_modules()
modules = [sys.modules[name] for name in names]
kernels = [k for m in modules for k in vars(m).values() if isinstance(k, JITFunction)]
assert len(names) > 10 and len(kernels) > 50
assert all(kernel.hash is not None for kernel in kernels)
assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
"""
    environment = {**os.environ}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
