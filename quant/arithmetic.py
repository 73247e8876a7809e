"""Named choices of quantising arithmetic, in one frozen record; no torch.

The default of every field is the exact arithmetic of the NVIDIA kernel stacks, the one that kernels and state
pools use. Everything else is here to compare with what other libraries store: their scales and codes, bit for
bit. Reading codes needs none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from driftgate.quant.formats import Format

__all__ = ["Arithmetic", "BlockChoice", "Convention", "MxRule", "Profile", "choose"]

_Choice = TypeVar("_Choice", bound=Enum)


class Convention(Enum):
    """How a scope's FP32 scale is found (fp8, fp8_e5m2, int8, int16); Q is the greatest code."""

    ENCODE = "encode"  # e = fl(Q/amax), scale = fl(1/e), code = rne(fl(x*e)): FlashInfer, TransformerEngine
    DECODE = "decode"  # scale = fl(amax/Q), code = rne(fl(x/scale)): compressed-tensors, vLLM
    ENCODE_POW2 = "encode_pow2"  # as encode, the mantissa of e cut off: the scale is a power of two


class Profile(Enum):
    """Whose NVFP4 arithmetic."""

    TE = "te"  # TransformerEngine, FlashInfer: reciprocals, a block scale may be 0
    MODELOPT = "modelopt"  # Model-Optimizer: divisions, block scale at least 2^-9, 1 for a block of zeros
    TORCHAO = "torchao"  # block scale at least 2^-6


class BlockChoice(Enum):
    """What the greatest magnitude of an NVFP4 block is coded as.

    The others code it as 4 where that makes the block's error smaller (squares or magnitudes, summed in
    float32), else as 6. The number is the greatest block scale that amax can lead to: 256 leaves room for the
    factor of 1.5, with 448 the largest blocks saturate.
    """

    SIX = "six"
    MSE_256 = "mse_256"
    MAE_256 = "mae_256"
    MSE_448 = "mse_448"
    MAE_448 = "mae_448"


class MxRule(Enum):
    """Exponent of an MX block of greatest magnitude b; emax is that of the element's greatest power of two."""

    RCEIL = "rceil"  # ceil(log2(fl(b/max))): nothing is clipped
    FLOOR = "floor"  # floor(log2 b) - emax: the rule of the OCP specification
    EVEN = "even"  # b rounded to the element's mantissa, then as floor
    CEIL = "ceil"  # ceil(log2 b) - emax


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How codes and scales are computed where libraries differ.

    Strings are taken for Enum members. A choice that a format does not have is refused by :meth:`check`.

    Attributes:
        convention: of a scope's scale (fp8, fp8_e5m2, int8, int16).
        profile: of nvfp4.
        block_choice: of nvfp4, with profile ``te`` alone.
        mx_rule: of mxfp4 and mxfp8.
        e2m1_random_bits: of stochastic nvfp4: 16, or 8 as the hardware's conversion takes.
    """

    convention: Convention = Convention.ENCODE
    profile: Profile = Profile.TE
    block_choice: BlockChoice = BlockChoice.SIX
    mx_rule: MxRule = MxRule.RCEIL
    e2m1_random_bits: int = 16

    def __post_init__(self) -> None:
        kinds = {"convention": Convention, "profile": Profile, "block_choice": BlockChoice, "mx_rule": MxRule}
        for name, kind in kinds.items():
            object.__setattr__(self, name, choose(name, getattr(self, name), kind))
        if self.e2m1_random_bits not in (8, 16):
            raise ValueError(f"e2m1_random_bits: expected 8 or 16, got {self.e2m1_random_bits}")
        if self.block_choice is not BlockChoice.SIX and self.profile is not Profile.TE:
            raise ValueError(f"block_choice: expected six with profile {self.profile.value}, got {self}")

    def __str__(self) -> str:
        """The choices that are not the default: ``mx_rule=floor``, or ``default``."""
        return ", ".join(f"{name}={value}" for name, value in self._chosen().items()) or "default"

    def check(self, fmt: Format) -> None:
        """Refuse a choice that is without effect on a format.

        Raises:
            ValueError: names the choice and the format.
        """
        used: dict[str, tuple[str, ...]] = {
            "scope": ("convention",),
            "block": ("mx_rule",),
            "block+scope": ("profile", "block_choice", "e2m1_random_bits"),
        }
        for name, value in self._chosen().items():
            if name not in used.get(fmt.scale.value, ()):
                raise ValueError(f"{name}: expected the default for {fmt.name}, which has no such choice, got {value}")

    def _chosen(self) -> dict[str, str]:
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: str(value.value if isinstance(value, Enum) else value) for name, value in chosen.items()}


def choose(argument: str, value: str | Enum, choices: type[_Choice]) -> _Choice:
    """The member with that value; a ValueError lists the values there are."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(str(choice.value) for choice in choices)
        raise ValueError(f"{argument}: expected one of {known}, got {value!r}") from None
