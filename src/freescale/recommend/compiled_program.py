"""A program compiled ahead of time by AOTInductor: faster, and only for machines like the one that
compiled it."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from freescale.recommend.portable import Input, PaddedHead

SERVING = "serving.json"
DEVICES = ("cpu", "cuda")
TOLERANCE = 1e-4
# extensions that compilers choose between, as Linux names them
_INSTRUCTIONS = re.compile(r"^(sse|ssse|avx|amx|fma|f16c|bmi|asimd|sve|sme|bf16|i8mm|fp16)")


def describe_machine(device: str) -> dict[str, Any]:
    """What a compiled program depends on."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "instructions": _list_instructions(),
        "device": device,
    }
    if device == "cuda":
        there = torch.cuda.is_available()
        found["cuda"] = torch.version.cuda
        found["gpu"] = torch.cuda.get_device_name() if there else None
        found["capability"] = list(torch.cuda.get_device_capability()) if there else None
    return found


def _list_instructions() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # no Linux
        return [torch.backends.cpu.get_cpu_capability()]
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = listed[1].split() if listed else []
    return sorted({word for word in words if _INSTRUCTIONS.match(word)})


def find_differences(needed: dict[str, Any]) -> list[str]:
    """How this machine differs from what a program was compiled for; none: it runs here."""
    here, found = describe_machine(needed["device"]), []
    for name, value in needed.items():
        if name == "instructions":
            missing = sorted(set(value) - set(here[name]))
            if missing:
                found.append(f"the processor lacks {', '.join(missing)}")
        elif name != "gpu" and here.get(name) != value:  # GPUs of one capability run the same code
            found.append(f"{name} is {here.get(name)}, not {value}")
    return found


def compile_program(
    program: ExportedProgram, head: PaddedHead, inputs: Sequence[Input], path: Path, device: str
) -> dict[str, Any]:
    """Compiles the program of a head for this machine, and describes what it needs.

    Raises:
        ValueError: there is no C++ compiler, no GPU for the device `cuda`, or the compiled program
            computes something else.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--aot cuda needs a GPU: run it on a machine like the one that serves")
    if device != "cpu":
        program = move_to_device_pass(program, device)
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:  # many kinds, by what is missing
        if "compiler" not in str(error).lower():
            raise
        raise ValueError(
            f"--aot {device} needs a C++ compiler, such as g++: install one, or leave --aot out "
            f"({error})"
        ) from error
    _check_outputs(torch._inductor.aoti_load_package(str(path)), head, inputs, device)
    return describe_machine(device)


@torch.no_grad()
def _check_outputs(
    compiled: Callable[..., Tensor], head: PaddedHead, inputs: Sequence[Input], device: str
) -> None:
    """Inductor has compiled wrong programs, which only some sizes show."""
    generator, longest = torch.Generator().manual_seed(0), head.encoder.longest
    for batch, length in ((1, 1), (3, min(longest, 33)), (2, longest)):
        sizes = {"batch": batch, "length": length, "candidates": 17}
        given = {each.name: each.draw(sizes, generator) for each in inputs}
        given["lengths"] = given["lengths"].clamp(max=length)
        expected = head(**given)
        found = compiled(**{name: value.to(device) for name, value in given.items()}).cpu()
        difference = float((found - expected).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ValueError(
                f"the program that torch {torch.__version__} compiled for {device} is wrong by "
                f"{difference:.2g} for histories of {length}: leave --aot out, or use another "
                "version of torch"
            )


def load_compiled(folder: str | Path) -> Callable[..., Tensor]:
    """Loads the compiled program of an export for serving. It takes the inputs of `serving.json`
    by name, on its device.

    Raises:
        ValueError: the folder has none, or it was compiled for another kind of machine.
    """
    about = json.loads((Path(folder) / SERVING).read_text(encoding="utf-8")).get("aot")
    if about is None:
        raise ValueError(f"{folder} has no compiled program: export it again, with --aot")
    differences = find_differences(about["requirements"])
    if differences:
        raise ValueError(
            f"{about['program']} of {folder} was compiled for another machine: "
            f"{'; '.join(differences)}; load encoder.pt2, which runs everywhere, or export with "
            "--aot on this machine"
        )
    return torch._inductor.aoti_load_package(str(Path(folder) / about["program"]))
