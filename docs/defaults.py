"""Resolves defaults on the API pages: `TrainConfig.device` appears by its value.

An extension of griffe, which reads the code for mkdocstrings."""

from __future__ import annotations

from typing import Any

import griffe


class ResolveDefaults(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path == "freescale":
            _resolve_members(pkg)


def _resolve_members(parent: griffe.Module | griffe.Class) -> None:
    for member in parent.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Function):
            for parameter in member.parameters:
                parameter.default = _resolve(parameter.default, member)
        elif isinstance(member, griffe.Module | griffe.Class):
            _resolve_members(member)


def _resolve(default: Any, function: griffe.Function) -> Any:
    """The value, if the default names one; `option(value, help, ...)` declares a field."""
    if isinstance(default, griffe.ExprCall) and str(default.function) == "option":
        return default.arguments[0]
    if not isinstance(default, griffe.ExprAttribute | griffe.ExprName):
        return default
    try:
        found = function.modules_collection[default.canonical_path]
    except KeyError:
        return default
    value = found.value if found.is_attribute else None
    return default if value is None else _resolve(value, function)
