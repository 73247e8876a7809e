"""Precision plans: the text people write, parsed, checked and printed back.

Grammar (contract): ``READ[/RECURRENCE]@L[+option…]`` or ``baseline``; options once each in any order, printed in the
order fold, readout, buf, scope, sr, dot, track, spec with defaults left out. No torch is imported here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from driftgate.errors import UsageError
from driftgate.kernels.contract import Dot, Fold, Readout, ReplayOptions
from driftgate.quant.formats import get_format

__all__ = ["BASELINE", "PrecisionPlan", "Role"]

MAX_LENGTH = 256
"""Greatest L: beyond it a buffer of a 128 x 128 head is larger than the state that it saves writing."""

_TEXT = re.compile(
    r"(?P<read>[a-z0-9_]+)(?:/(?P<recurrence>[a-z0-9_]+))?@(?P<length>-?[0-9]{1,9})(?P<options>(?:\+[^+\s]*)*)"
)
_FLAGS = {
    "exact": ("fold", Fold.EXACT),
    "cached": ("fold", Fold.CACHED),
    "output_only": ("readout", Readout.OUTPUT_ONLY),
    "exact_readout": ("readout", Readout.EXACT_READOUT),
    "state_output": ("readout", Readout.STATE_OUTPUT),
    "sr": ("stochastic", True),
}
_VALUES = {
    "buf": ("buffer", {"bf16": "bf16", "fp32": "fp32"}),
    "dot": ("dot", {dot.value: dot for dot in Dot}),
}
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_COUNTS = {"track": "track", "spec": "window"}
_PLANNED = ("head",)
"""Options of the grammar whose kernels this version does not have."""


class Role(Enum):
    """What a plan is in a run: a candidate is gated, a control is expected to drift and never fails the gate."""

    CANDIDATE = "candidate"
    CONTROL = "control"


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """One precision of the recurrent state.

    Args:
        options: the numeric part, as kernels read it.
        layers: decoder-layer indices that have options of their own, in order; ``mixed.mix_layers`` makes such plans.
        head: the value head that alone has them, None for all; an ablation by heads measures such plans.

    Examples:
        >>> str(PrecisionPlan.parse("nvfp4/fp32@16+exact"))
        'nvfp4/fp32@16'
        >>> PrecisionPlan.parse("nvfp4/fp32@16").options.split
        True
    """

    options: ReplayOptions
    layers: tuple[tuple[int, ReplayOptions], ...] = ()
    head: int | None = None

    @classmethod
    def parse(cls, text: str) -> PrecisionPlan:
        """Read a plan.

        Args:
            text: e.g. ``"nvfp4/fp32@16+cached"``.

        Raises:
            UsageError: one line that names what is wrong and what would be right.
        """
        text = text.strip()
        if text == "baseline":
            return BASELINE
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(
                f"plan {text!r}: expected READ[/RECURRENCE]@L[+option...], e.g. nvfp4/fp32@16, or baseline"
            )
        read = get_format(match["read"])
        recurrence = get_format(match["recurrence"] or match["read"])
        length = int(match["length"])
        if not 1 <= length <= MAX_LENGTH:
            raise UsageError(f"plan {text!r}: L must be 1 to {MAX_LENGTH}, got {length}")
        if read.bits > recurrence.bits:
            raise UsageError(
                f"plan {text!r}: READ {read.name} is wider than RECURRENCE {recurrence.name}; "
                f"write {recurrence.name}@{length} or swap the two"
            )
        fields = _parse_options(text, match["options"])
        try:
            options = ReplayOptions(read=read.name, recurrence=recurrence.name, length=length, **fields)  # type: ignore[arg-type]
        except ValueError as error:
            raise UsageError(f"plan {text!r}: {_reword(str(error))}") from error
        if "buffer" in fields and options.readout is Readout.EXACT_READOUT and options.fold is Fold.EXACT:
            raise UsageError(f"plan {text!r}: +buf has no effect, exact readout with exact fold keeps no corrections")
        return cls(options=options)

    def __str__(self) -> str:
        """The text of a plan; of a mixed one a description, which no command line takes."""
        text = _write(self.options)
        by_text: dict[str, list[str]] = {}
        for index, options in self.layers:
            by_text.setdefault(_write(options), []).append(str(index))
        where = "" if self.head is None else f" head {self.head}"
        parts = [f"{own} in layer{'s' * (len(at) > 1)} {','.join(at)}{where}" for own, at in by_text.items()]
        return ", ".join([text, *parts])

    @property
    def every(self) -> tuple[ReplayOptions, ...]:
        """The options of all layers, each once, those of the unnamed layers first."""
        return tuple(dict.fromkeys((self.options, *(options for _, options in self.layers))))

    def at(self, layer: int) -> ReplayOptions:
        """The options of a decoder layer."""
        return dict(self.layers).get(layer, self.options)

    @property
    def low_precision(self) -> bool:
        """Whether any format of the plan is below FP32."""
        return self.low_recurrence or any(o.read != "fp32" for o in self.every)

    @property
    def low_recurrence(self) -> bool:
        """Whether what is fed back into a state is rounded in any layer."""
        return any(o.recurrence != "fp32" for o in self.every)


def _write(o: ReplayOptions) -> str:
    """Options as a plan text."""
    if o.step_by_step:
        return "baseline"
    text = f"{o.read}/{o.recurrence}@{o.length}" if o.split else f"{o.read}@{o.length}"
    if o.fold is not Fold.EXACT:
        text += f"+{o.fold.value}"
    if o.readout is not Readout.OUTPUT_ONLY:
        text += f"+{o.readout.value}"
    if o.buffer != "fp32":
        text += f"+buf={o.buffer}"
    if o.stochastic:
        text += "+sr"
    if o.dot is not Dot.IEEE:
        text += f"+dot={o.dot.value}"
    if o.track:
        text += f"+track={o.track}"
    if o.window:
        text += f"+spec={o.window}"
    return text


def _parse_options(text: str, options: str) -> dict[str, object]:
    """Options of a plan text as keyword arguments of ReplayOptions."""
    fields: dict[str, object] = {}
    for option in options.split("+")[1:]:
        name, _, value = option.partition("=")
        if name in _PLANNED:
            raise UsageError(f"plan {text!r}: +{name} is not available in this version; leave it out")
        parsed: object
        if name in _FLAGS and not value:
            field, parsed = _FLAGS[name]
        elif name in _VALUES and value in _VALUES[name][1]:
            field, parsed = _VALUES[name][0], _VALUES[name][1][value]
        elif name in _COUNTS and _COUNT.fullmatch(value):
            field, parsed = _COUNTS[name], int(value)
        else:
            raise UsageError(
                f"plan {text!r}: unknown option +{option}; known: +exact +cached +output_only +exact_readout "
                "+state_output +buf=bf16|fp32 +sr +dot=ieee|tf32|bf16 +track=N +spec=T"
            )
        if field in fields:
            raise UsageError(f"plan {text!r}: +{option} contradicts or repeats another option; give it once")
        fields[field] = parsed
    return fields


def _reword(message: str) -> str:
    """What ReplayOptions refuses, in the words of a plan text."""
    for name, option in (("stochastic", "+sr"), ("window", "+spec"), ("dot", "+dot")):
        if message.startswith(f"{name}: "):
            return option + message[len(name) :]
    return message


BASELINE = PrecisionPlan(options=ReplayOptions())
"""FP32 state, the step-by-step kernel: read and written at every step."""
