"""The three functions through which transformers takes a decode step, one a recurrence: what they are given and return.

Every modeling module holds its own copy of one of them as a global, with the same arguments from 5.15 on; what differs
between releases is read here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.mamba2.gates import compute_dt

__all__ = ["GDN", "KDA", "MAMBA2", "DecodeFunction", "StepInputs"]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Inputs of one decode step of one recurrent layer, under the argument names of ``decode_step``.

    Attributes:
        streams: what every row has of its own, [B, ...]: q, k, v, g, beta; or x, B, C, dt and, where the model has it
            inside its recurrence, z. Gates are float32, the rest is as the model delivers it, before the L2 norm.
        constants: what a layer has for all rows: A and D of Mamba-2, [HV] float32.
    """

    streams: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def values(self) -> torch.Tensor:
        """What a step adds to the state, v or x, [B, HV, d_v]."""
        return self.streams["v" if "v" in self.streams else "x"]

    def arguments(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of ``decode_step``."""
        return {**self.streams, **self.constants}

    def take_rows(self, rows: slice | torch.Tensor) -> StepInputs:
        """Some rows."""
        return StepInputs(streams={name: x[rows] for name, x in self.streams.items()}, constants=self.constants)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Streams, then constants, each in its order."""
        return (*self.streams.values(), *self.constants.values())

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> StepInputs:
        """Other tensors under the same names, in the order of ``tensors``."""
        n = len(self.streams)
        return StepInputs(
            streams=dict(zip(self.streams, tensors[:n], strict=True)),
            constants=dict(zip(self.constants, tensors[n:], strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class DecodeFunction:
    """How driftgate takes a decode function's place.

    Attributes:
        name: of the global that mixers look up at every call.
        recurrence: which it computes.
        head_shape: heads of a mixer that calls it.
        read: (its arguments, shape=) -> the step's inputs.
        answer: (outputs [B, HV, d_v], its positional, its keyword arguments) -> what it would return; the state in the
            model's cache is handed back as it came.
        transposed: the model's states are [d_k, d_v].
        mimic: (state of some rows [B, HV, d_v, d_k] float32, these rows, its other arguments) -> outputs and new state,
            with transformers' own roundings; None where it has none beside those of the output.
    """

    name: str
    recurrence: Recurrence
    head_shape: Callable[[Any], HeadShape]
    read: Callable[..., StepInputs]
    answer: Callable[[torch.Tensor, tuple[Any, ...], Mapping[str, Any]], Any]
    transposed: bool
    mimic: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None

    def turn_states(self, states: torch.Tensor) -> torch.Tensor:
        """States of the model's cache as those of a pool, [B, HV, d_v, d_k], or the other way round; a view."""
        return states.transpose(-1, -2) if self.transposed else states


def _read_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    shape: HeadShape,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> StepInputs:
    """Arguments of the delta rule: [B, 1, heads, …].

    transformers before 5.24 repeats q and k to the value heads; every group's first head is taken there. β is
    upcast: the model's own rounding of it is shared by all plans.

    Raises:
        ValueError: the model asks for no L2 norm, which none of the covered families does.
    """
    if not use_qk_l2norm_in_kernel:
        raise ValueError("use_qk_l2norm_in_kernel: expected True, got False; the model's code is not what is covered")
    q, k = (x[:, 0, :: x.shape[2] // shape.key_heads] for x in (query, key))
    return StepInputs(streams={"q": q, "k": k, "v": value[:, 0], "g": g[:, 0].float(), "beta": beta[:, 0].float()})


def _answer_delta(out: torch.Tensor, _args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return out[:, None], kwargs["initial_state"]


def _read_mamba2(
    _state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    shape: HeadShape,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> StepInputs:
    """Arguments of Mamba-2's step: x [B, HV, d_head], B and C [B, G, d_state]; dt, A, D, dt_bias spread over a head.

    dt is formed in FP32, without limits: transformers applies none in decode.
    """
    bias = None if dt_bias is None else dt_bias[:, 0]
    streams = {"x": hidden_states, "B": B, "C": C, "dt": compute_dt(dt[:, :, 0], bias, softplus=dt_softplus)}
    if z is not None:
        streams["z"] = z
    constants = {"A": A[:, 0, 0].float()} | ({} if D is None else {"D": D[:, 0].float()})
    return StepInputs(streams=streams, constants=constants)


def _mimic_mamba2(
    state: torch.Tensor,
    rows: slice,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step as transformers rounds it: dt, dt·B, its product with x, and the state that is read, in the model's type.

    Returns:
        y [B, HV, d_head] of x's type, and the new state [B, HV, d_head, d_state] float32.
    """
    x, step = hidden_states[rows], dt[rows, :, 0]
    if dt_bias is not None:
        step = step + dt_bias[:, 0].to(step.dtype)
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    B, C = (t[rows].repeat_interleave(x.shape[1] // t.shape[1], dim=1) for t in (B, C))
    added = (step[..., None] * B)[:, :, None] * x[..., None]
    state = state * torch.exp(step.float() * A[:, 0, 0].float())[..., None, None] + added
    y = torch.bmm(state.to(C.dtype).flatten(0, 1), C.flatten(0, 1)[..., None]).view(x.shape)
    if D is not None:
        y = (y + x * D).to(y.dtype)
    if z is not None:
        y = y * torch.nn.functional.silu(z[rows])
    return y.to(x.dtype), state


GDN = DecodeFunction(
    name="torch_recurrent_gated_delta_rule",
    recurrence=Recurrence.GDN,
    head_shape=lambda mixer: HeadShape(
        key_heads=mixer.num_k_heads, value_heads=mixer.num_v_heads, d_k=mixer.head_k_dim, d_v=mixer.head_v_dim
    ),
    read=_read_delta,
    answer=_answer_delta,
    transposed=True,
)
KDA = DecodeFunction(
    name="recurrent_kimi_delta_attention",
    recurrence=Recurrence.KDA,
    head_shape=lambda mixer: HeadShape(
        key_heads=mixer.num_heads, value_heads=mixer.num_heads, d_k=mixer.head_dim, d_v=mixer.head_dim
    ),
    read=_read_delta,
    answer=_answer_delta,
    transposed=True,
)
MAMBA2 = DecodeFunction(
    name="mamba2_selective_state_update",
    recurrence=Recurrence.MAMBA2,
    head_shape=lambda mixer: HeadShape(
        key_heads=mixer.n_groups, value_heads=mixer.num_heads, d_k=mixer.ssm_state_size, d_v=mixer.head_dim
    ),
    read=_read_mamba2,
    answer=lambda out, _args, _kwargs: out,
    transposed=False,
    mimic=_mimic_mamba2,
)
