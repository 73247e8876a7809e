"""What a difference of bits looks like: a known fault, where the evidence fits one, else ``unknown``.

How: first what the place of the difference says alone; then the values, where FP32 was rounded to fewer bits or a flush
was not written; then the steps since the last flush are taken again in torch, in each known wrong way, and the one that
gives what the kernel gave is named, provided that the right way gives what was expected; last the histogram of ulps.
A name is a hint for whoever looks for the fault, never part of a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.step_data import StepData
from driftgate.kernels.contract import ReplayOptions
from driftgate.quant.codecs import decode_rows, encode_rows
from driftgate.quant.formats import get_format

__all__ = ["Evidence", "Fault", "name_cause"]

_NEAR = 0.1
"""Share of the difference that a wrong way may leave unexplained, and by which the right way may miss the expected."""

_PLACES = {
    "padding": "padded rows are not written with zeros",
    "unused slot": "a write outside the row's slot",
    "gaps between slots": "a write outside the row's slot",
    "pool, padded rows": "a write for a padded row",
    "pool, batch 0": "a write for an empty batch",
    "other seed": "draws that do not depend on the seed",
    "other tokens": "draws that do not depend on the tokens seen",
    "other sequence": "draws that do not depend on the sequence",
    "other slot": "draws or addresses that depend on the slot",
}
_ORDER = "a multiply-add contracted otherwise, or another order of additions (tile, warps, layout)"
_OUTPUT_ORDER = "another order of additions in the output alone (factored output, tile, warps)"


class Fault(Enum):
    """Wrong ways to take a step, as they are named."""

    NONE = ""
    NORM = "norm epsilon outside the root"
    DECAY = "decay after the update"
    BETA = "beta rounded to BF16"
    STATE = "state rounded to BF16 at every step"
    KEY = "dt·B rounded to BF16"
    CHANNEL = "one decay for all channels"
    SKIP = "D·x added twice"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The first difference of a run: one row and head.

    Attributes:
        what: ``output``, ``checkpoint`` or ``copy``.
        options: the plan.
        row, head: of the batch, of the values.
        first_step, last_step: steps that are not in the anchor yet, the one that shows the difference included.
        anchor: [d_v, d_k] float32, the dequantised checkpoint that the step found.
        read: [d_v, d_k] float32, what a readout found.
        expected, got: [d_v] output, or [d_v, d_k] float32 dequantised.
    """

    what: str
    options: ReplayOptions
    row: int
    head: int
    first_step: int
    last_step: int
    anchor: torch.Tensor
    read: torch.Tensor
    expected: torch.Tensor
    got: torch.Tensor


def name_cause(tally: BitTally, evidence: Evidence | None, data: StepData) -> str:
    """The cause that the differences of a tally look like, in a few words; ``unknown`` where nothing fits."""
    first = tally.first
    if first is None:
        return "unknown"
    if first["what"] in _PLACES:
        return _PLACES[first["what"]]
    if not isinstance(first["got"], (int, float)):
        return "a read past the cursor or outside the inputs, where NaN lies"
    if evidence is not None:
        named = _compare_values(evidence) or _try_faults(evidence, data)
        if named:
            return named
    if evidence is not None and _is_rounding(evidence):
        return _OUTPUT_ORDER if all(what.startswith("output") for what in tally.different) else _ORDER
    return "unknown"


def _is_rounding(evidence: Evidence) -> bool:
    """Whether a float differs by no more than some roundings of a number as large as the greatest around it."""
    expected, got = evidence.expected, evidence.got
    if evidence.what == "copy" or (evidence.what == "checkpoint" and evidence.options.recurrence != "fp32"):
        return False
    limit = 8 * torch.finfo(expected.dtype).eps * expected.abs().max()
    return bool((expected - got).abs().max() <= limit)


def _round_trip(x: torch.Tensor, name: str) -> torch.Tensor:
    """What a format makes of [d_v, d_k] float32."""
    fmt = get_format(name)
    return decode_rows(fmt, *encode_rows(fmt, x.contiguous(), nonfinite="saturate"), x.shape[-1])


def _compare_values(evidence: Evidence) -> str | None:
    """Faults of a stored state that its values show."""
    e = evidence
    if e.what != "checkpoint":
        return None
    if torch.equal(e.got, e.anchor):
        return "a flush that is not written"
    if e.options.recurrence == "fp32":
        for name in dict.fromkeys(("bf16", "fp16", e.options.read)):
            if name != "fp32" and torch.equal(e.got, _round_trip(e.expected, name)):
                return f"FP32 state stored through {name.upper()}"
    return None


def _try_faults(evidence: Evidence, data: StepData) -> str | None:
    """The wrong way that gives what the kernel gave."""
    e = evidence
    if e.what not in ("output", "checkpoint", "copy") or e.options.stochastic:
        return None
    expected, got = e.expected.float(), e.got.float()
    wanted = _NEAR * float((got - expected).abs().sum())
    right = _simulate(e, data, Fault.NONE, fold=True, step=True)
    if e.what == "copy":
        unrounded = _round_trip(right[0], e.options.read)
        fits = torch.isclose(got, unrounded, rtol=1e-5, atol=0.0).float().mean() > 0.95  # FP32 errors move some codes
        return "copy quantised from the FP32 state, not from what the checkpoint reads back as" if fits else None
    if float((_shown(e, right) - expected).abs().sum()) > wanted:
        return None  # rounding alone explains as much: no way can be told from another
    ways = {"flush starts from the copy": _simulate(e, data, Fault.NONE, fold=True, step=True, start=e.read)}
    if data.recurrence.delta_rule:
        ways["corrections cached from the copy are folded"] = _simulate_cached(e, data)
    for fault in Fault:
        if fault is not Fault.NONE:
            ways[fault.value] = _simulate(e, data, fault, fold=True, step=True)
            ways[f"{fault.value}, in the fold alone"] = _simulate(e, data, fault, fold=True, step=False)
            ways[f"{fault.value}, in the step alone"] = _simulate(e, data, fault, fold=False, step=True)
    missed = {name: float((_shown(e, way) - got).abs().sum()) for name, way in ways.items()}
    best = min(missed, key=lambda name: missed[name])
    return best if missed[best] <= wanted else None


def _shown(evidence: Evidence, way: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """State and output of a simulation, as the difference shows it."""
    state, output = way
    if evidence.what == "output":
        return output.to(evidence.got.dtype).float()
    return state if evidence.options.recurrence == "fp32" else _round_trip(state, evidence.options.recurrence)


def _simulate(
    evidence: Evidence,
    data: StepData,
    fault: Fault,
    *,
    fold: bool,
    step: bool,
    start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State [d_v, d_k] and output [d_v] after the steps since the anchor; ``fold``, ``step``: where the fault is."""
    state = evidence.anchor if start is None else start
    output = torch.zeros_like(state[:, 0])
    for t in range(evidence.first_step, evidence.last_step + 1):
        faulty = step if t == evidence.last_step else fold
        state, _, output = _take(evidence, data, t, state, fault if faulty else Fault.NONE)
    return state, output


def _simulate_cached(evidence: Evidence, data: StepData) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_simulate``, with the corrections of buffered steps from what readouts read."""
    state, read = evidence.anchor, evidence.read
    output = torch.zeros_like(state[:, 0])
    for t in range(evidence.first_step, evidence.last_step + 1):
        if t == evidence.last_step:
            state, _, output = _take(evidence, data, t, state, Fault.NONE)
            break
        read, u, _ = _take(evidence, data, t, read, Fault.NONE)
        _, k, _, g, _ = _inputs(evidence, data, t, Fault.NONE)
        state = state * g.exp() + u[:, None] * k
    return state, output


def _inputs(evidence: Evidence, data: StepData, t: int, fault: Fault) -> tuple[torch.Tensor, ...]:
    """q, k, v, log decay and beta of one row and head at step t, as a step uses them."""
    row, head, group = evidence.row, evidence.head, data.shape.group

    def one(name: str, of_keys: bool) -> torch.Tensor:
        return data.streams[name][t, row, head // group if of_keys else head].float()

    if not data.recurrence.delta_rule:
        dt = one("dt", False)
        k = dt * one("B", True)
        k = k.bfloat16().float() if fault is Fault.KEY else k
        return one("C", True), k, one("x", False), data.constants["A"][head] * dt, torch.ones_like(dt)
    q, k = one("q", True), one("k", True)
    if fault is Fault.NORM:
        q, k = (x / ((x * x).sum().sqrt() + 1e-6) for x in (q, k))
    else:
        q, k = (x / ((x * x).sum() + 1e-6).sqrt() for x in (q, k))
    g, beta = one("g", False), one("beta", False)
    if fault is Fault.CHANNEL and g.ndim:
        g = g[:1]
    return q * data.shape.d_k**-0.5, k, one("v", False), g, beta.bfloat16().float() if fault is Fault.BETA else beta


def _take(
    evidence: Evidence, data: StepData, t: int, state: torch.Tensor, fault: Fault
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step with a fault: state, what was added, output."""
    q, k, v, g, beta = _inputs(evidence, data, t, fault)
    decay = g.exp()
    if fault is not Fault.DECAY:
        state = state * decay
    u = beta * (v - state @ k) if data.recurrence.delta_rule else v
    state = state + u[:, None] * k
    if fault is Fault.DECAY:
        state = state * decay
    if fault is Fault.STATE:
        state = state.bfloat16().float()
    output = state @ q
    if "D" in data.constants:
        output = output + (2 if fault is Fault.SKIP else 1) * data.constants["D"][evidence.head] * v
    if "z" in data.streams:
        output = output * torch.nn.functional.silu(data.streams["z"][t, evidence.row, evidence.head].float())
    return state, u, output
