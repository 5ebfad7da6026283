"""Targets of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

from freescale_bench.common.results import Target


def list_targets() -> Iterator[Target]:
    for name in ("gather", "sgd", "adagrad", "rowwise_adagrad", "adam"):
        yield Target(
            f"{name}, % of ceiling",
            f"{name} of 1,000,000 random rows of 128 floats, of copy bandwidth",
            70,
            "%",
        )
    for way, width, rate in (
        ("forward", 128, 420),
        ("backward", 128, 474),
        ("forward", 64, 300),
        ("backward", 64, 200),
    ):
        text = f"attention {way}, 4 x 16,384 tokens, 4 heads of {width}"
        yield Target(f"attention {way}, full, {width} wide, TFLOP/s", text, rate, "TFLOP/s")
        text = f"attention {way}, 4 heads of {width}, log-normal lengths, of the full-length rate"
        yield Target(f"attention {way}, {width} wide, log-normal % of full", text, 85, "%")
    text = "attention backward, 32 x 4,099 tokens, 4 heads of 256"
    yield Target("attention backward, fixed, wide, ms", text, 8.25, "ms", at_least=False)
    for width in (64, 128):
        for way in ("forward", "backward"):
            text = f"attention {way}, 32 x 4,096 tokens, 4 heads of {width}: time with both biases"
            name = f"attention {way}, {width} wide, biases, times without"
            yield Target(name, f"{text}, of that without", 2, "times", at_least=False)
    text = "HSTU layer forward + backward, log-normal lengths up to 21,000, faster than eager"
    yield Target("layer, times faster", text, 5, "times")
    text = "peak memory of a layer per token, at 21,000 of that at 5,250"
    yield Target(
        "layer, memory per token, longest over a quarter of it", text, 1.05, "times", at_least=False
    )
