"""Mixed plans: a plan with another precision in some recurrent layers, under a name of its own.

A mixed plan has no text that a command line takes; a suite says ``name``, ``plan`` and ``layers``, and the manifest of
a run keeps the three. One cursor serves all layers, so an override keeps length, forced flushes, windows and readout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.errors import InputError, UsageError
from driftgate.kernels.contract import ReplayOptions

if TYPE_CHECKING:
    from driftgate.accuracy.records import RunData

__all__ = ["check_layers", "check_name", "describe_plan", "find_plan", "mix_layers", "read_plan"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._+=-]{0,62}[A-Za-z0-9])?")
_LAYERS = re.compile(r"[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})*")
_RESERVED = "baseline"


def check_name(name: str) -> str:
    """A name for a mixed plan: no plan text, and nothing that a pattern of a policy would read otherwise.

    Raises:
        UsageError: it does not fit.
    """
    if _NAME.fullmatch(name) is None or name.startswith(_RESERVED):
        raise UsageError(
            f"plan name {name!r}: expected up to 64 letters, digits, spaces and . _ + = -, and not baseline; "
            "plan texts are for plans without layers"
        )
    return name


def mix_layers(base: PrecisionPlan, layers: Mapping[str, str], *, name: str) -> PrecisionPlan:
    """A plan with overrides.

    Args:
        base: of every layer that is not named.
        layers: decoder-layer indices as in the checkpoint, e.g. ``"0,3"``, to plan texts.
        name: of the plan, for messages.

    Raises:
        UsageError: no layer, one that is named twice, or an override that does not go with the base.
    """
    if base.options.step_by_step:
        raise UsageError(f"plan {name}: baseline always runs as it is; take fp32@L for layers that keep FP32")
    found: dict[int, ReplayOptions] = {}
    for key, text in layers.items():
        if _LAYERS.fullmatch(key) is None:
            raise UsageError(f"plan {name}: layers {key!r}: expected decoder-layer indices, e.g. 0,3")
        own = PrecisionPlan.parse(text).options
        _refuse_other_cursor(base.options, own, where=f"plan {name}: layers {key}: {text}")
        for index in map(int, key.split(",")):
            if index in found:
                raise UsageError(f"plan {name}: layer {index} is named twice; name it once")
            found[index] = own
    if not found:
        raise UsageError(f"plan {name}: layers names no layer; leave layers and name out, or name some")
    return PrecisionPlan(options=base.options, layers=tuple(sorted(found.items(), key=lambda item: item[0])))


def _refuse_other_cursor(base: ReplayOptions, own: ReplayOptions, *, where: str) -> None:
    """One cursor, one flush flag and one launch serve all layers."""
    fields = (("length", "L"), ("track", "+track"), ("window", "+spec"), ("readout", "readout"), ("dot", "+dot"))
    for field, word in fields:
        expected, got = getattr(base, field), getattr(own, field)
        if expected != got:
            texts = [getattr(value, "value", value) for value in (expected, got)]
            raise UsageError(f"{where}: one cursor serves all layers; expected {word} = {texts[0]}, got {texts[1]}")


def check_layers(plans: Mapping[str, PrecisionPlan], layer_indices: Sequence[int]) -> None:
    """Refuse overrides of layers that a model does not have.

    Args:
        plans: by name.
        layer_indices: decoder-layer index of each recurrent layer.

    Raises:
        InputError: names the first such layer and the model's recurrent layers.
    """
    for name, plan in plans.items():
        for index, _ in plan.layers:
            if index not in layer_indices:
                known = ", ".join(str(i) for i in layer_indices)
                raise InputError(f"plan {name}: layer {index} is no recurrent layer of the model; these are {known}")


def describe_plan(plan: PrecisionPlan) -> dict[str, Any]:
    """A plan of a run as JSON: ``plan`` and, where it is mixed, ``layers``; ``read_plan`` reads it back."""
    texts: dict[str, list[str]] = {}
    for index, options in plan.layers:
        texts.setdefault(str(PrecisionPlan(options=options)), []).append(str(index))
    layers = {",".join(indices): text for text, indices in texts.items()}
    return {"plan": str(PrecisionPlan(options=plan.options))} | ({"layers": layers} if layers else {})


def read_plan(name: str, described: Mapping[str, Any]) -> PrecisionPlan:
    """The plan that ``describe_plan`` described; without ``plan``, as runs before mixed plans, the name is its text."""
    base = PrecisionPlan.parse(described.get("plan", name))
    layers = described.get("layers")
    return mix_layers(base, layers, name=name) if layers else base


def find_plan(run: RunData, name: str) -> PrecisionPlan:
    """The plan behind a key of a stored run's ``plans``."""
    return read_plan(name, run.manifest.plans.get(name, {}))
