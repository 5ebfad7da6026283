"""Dense parameters and buffers of any dtype and layout are rank 0's on every rank, or refused by
name on all of them."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks
from helpers.toys import Clicks, clicks_batch
from torch import nn

import freescale


def _random(dtype, rank):
    """Bits of any kind, infinities, not-a-numbers and negative zeros too: another pattern on each
    rank."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(
        0,
        2 if dtype == torch.bool else 256,
        (12 * size,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(rank),
    )
    return bits.view(dtype)


DTYPES = [
    *(
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.uint16, torch.uint32, torch.uint64),
]
LAYOUTS = {
    "transposed": lambda values: values.view(3, 4).t(),
    "every second": lambda values: values[::2],
    "expanded": lambda values: values[:4].expand(5, 4),
    "one, expanded": lambda values: values[0].expand(5),
    "one of one": lambda values: values[::5][1:2],
    "a number": lambda values: values[0],
    "empty": lambda values: values[:0],
    "conjugate": lambda values: values.to(torch.complex64).conj(),
    "channels last": lambda values: values.view(1, 3, 2, 2).to(memory_format=torch.channels_last),
}


def _odd(rank):
    model = Clicks()
    for dtype in DTYPES:
        model.register_buffer(f"as {dtype}".replace(".", " "), _random(dtype, rank))
    for name, laid in LAYOUTS.items():
        model.register_buffer(name, laid(torch.arange(12.0) + 100 * rank))
    model.register_parameter(
        "frozen", nn.Parameter(_random(torch.float8_e5m2, rank), requires_grad=False)
    )
    return model


def _bits(tensor):
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist()


def _taken(transport):
    model = _odd(transport.rank)
    strides = {name: buffer.stride() for name, buffer in model.named_buffers()}
    freescale.parallelize(model, Clicks.ids, transport=transport)
    expected = _odd(0)
    wrong = [
        name
        for name, buffer in expected.named_buffers()
        if _bits(model.get_buffer(name)) != _bits(buffer)
    ]
    wrong += [name for name, buffer in model.named_buffers() if buffer.stride() != strides[name]]
    return wrong + ["frozen"] * (_bits(model.frozen) != _bits(expected.frozen))


def test_rank_zeros_bits_are_taken_whatever_the_dtype_and_layout():
    assert run_ranks(2, _taken) == [[], []]


class Scaled(Clicks):
    """A trained parameter of another kind beside the usual ones."""

    def __init__(self, scale, trained=True):
        super().__init__()
        self.scale = nn.Parameter(scale, requires_grad=trained)

    def forward(self, batch):
        scale = torch.view_as_real(self.scale) if self.scale.is_complex() else self.scale
        return {task: loss * scale.double().mean() for task, loss in super().forward(batch).items()}


def _trained(transport, dtype, strided):
    torch.manual_seed(transport.rank)
    scale = torch.randn(3, 4).to(dtype).t() if strided else torch.randn(6).to(dtype)
    parallel = freescale.parallelize(
        Scaled(scale), Clicks.ids, freescale.SGD(lr=0.1), transport=transport
    )
    before = parallel.module.scale.detach().clone()
    pipeline = freescale.Pipeline(parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.05))
    list(pipeline.run([clicks_batch(4, 10 * step + transport.rank) for step in range(3)]))
    after = parallel.module.scale.detach()
    assert not torch.equal(before, after) and after.stride() == scale.stride()
    return [_bits(parameter) for parameter in parallel.dense_parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("strided", [False, True])
def test_trained_parameters_stay_the_same_on_all_ranks(dtype, strided):
    first, second = run_ranks(2, _trained, dtype, strided)
    assert first == second


REFUSED = {
    "fp8 that is trained": (
        lambda: Scaled(torch.ones(4).to(torch.float8_e4m3fn)),
        "'scale' is trained in torch.float8_e4m3fn",
    ),
    "sparse": (
        lambda: _with(torch.eye(3).to_sparse()),
        ("buffer 'odd' is stored as torch.sparse_coo"),
    ),
    "quantized": (
        lambda: _with(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        "buffer 'odd' is quantized",
    ),
    "overlapping": (
        lambda: _with(torch.arange(6.0).unfold(0, 3, 1)),
        ("buffer 'odd' has elements that share memory"),
    ),
    "meta": (lambda: _with(torch.empty(3, device="meta")), "buffer 'odd' is on the meta device"),
    "lazy": (lambda: _lazy(), "dense parameter 'later.weight' has no shape yet"),
}


def _with(buffer):
    model = Clicks()
    model.register_buffer("odd", buffer)
    return model


def _lazy():
    model = Clicks()
    model.later = nn.LazyLinear(3)
    return model


def _refused(transport, what):
    """Only rank 1's model is odd: all hear of it."""
    model = REFUSED[what][0]() if transport.rank == 1 else Clicks()
    with pytest.raises(ValueError) as caught:
        freescale.parallelize(model, Clicks.ids, transport=transport)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_replicated_is_refused_by_name_on_all_ranks(what):
    with pytest.raises(ValueError, match=REFUSED[what][1]):
        freescale.parallelize(REFUSED[what][0](), Clicks.ids)
    for error, text in gather_ranks(2, _refused, what):
        assert error is None and REFUSED[what][1] in text, (error, text)


DIFFERENT = {
    "shape": (
        lambda: Scaled(torch.ones(4)),
        lambda: Scaled(torch.ones(5)),
        (
            r"'scale' is float32 "
            r"\[4\], trained on rank 0"
        ),
    ),
    "dtype": (
        lambda: Scaled(torch.ones(4)),
        lambda: Scaled(torch.ones(4).bfloat16()),
        r"and bfloat16 \[4\], trained on rank 1",
    ),
    "frozen": (
        lambda: Scaled(torch.ones(4)),
        lambda: Scaled(torch.ones(4), False),
        "not trained on rank 1",
    ),
    "missing": (lambda: Scaled(torch.ones(4)), Clicks, "'scale' is .* and missing on rank 1"),
    "more": (Clicks, lambda: Scaled(torch.ones(4)), "'scale' is missing on rank 0"),
}


def _different(transport, what):
    model = DIFFERENT[what][transport.rank]()
    with pytest.raises(ValueError, match=DIFFERENT[what][2]):
        freescale.parallelize(model, Clicks.ids, transport=transport)
    return True


@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_differ_between_ranks_are_refused_by_name(what):
    assert all(run_ranks(2, _different, what))
