"""Format.quantize: scopes, block axis, reports and refusals."""

import re

import numpy as np
import pytest
import torch

from driftgate.quant import FORMATS, Arithmetic, Scope, get_format
from driftgate.quant.oracle import decode_row, encode_row, pack_nibbles

SCOPE_SHAPES = {"tensor": (1, 1, 1, 1), "slot": (2, 1, 1, 1), "head": (2, 3, 1, 1), "row": (2, 3, 5, 1)}


def draw_state(*shape, seed=0):
    """Normal states whose heads and slots differ in size, so that scopes differ."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.uniform(-6, 6, (*shape[:-1], 1))
    return torch.from_numpy((rng.standard_normal(shape) * size).astype(np.float32))


def stored_tensors(stored):
    return [part for part in (stored.codes, stored.scales, stored.global_scale) if part is not None]


@pytest.mark.parametrize("scope", SCOPE_SHAPES)
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.scope_scaled])
def test_scope_names_the_elements_that_share_a_scale(name, scope):
    x = draw_state(2, 3, 5, 24)
    stored = get_format(name).quantize(x, scope=scope)
    shape = SCOPE_SHAPES[scope]
    axes = [i for i, length in enumerate(shape) if length != x.shape[i]]
    assert torch.equal(stored.amax, x.abs().amax(axes, keepdim=True))
    assert (stored.global_scale if name == "nvfp4" else stored.scales).shape == shape
    amax = np.broadcast_to(stored.amax.numpy(), (2, 3, 5, 1))
    for index in np.ndindex(2, 3, 5):
        row = encode_row(name, x[index].numpy(), amax=amax[index][0])
        codes = pack_nibbles(row.codes) if name == "nvfp4" else row.codes
        assert stored.codes[index].tolist() == codes
        np.testing.assert_array_equal(stored.dequantize()[index].numpy(), decode_row(name, row, 24))


@pytest.mark.parametrize("name", FORMATS)
def test_default_scope_is_row(name):
    x = draw_state(2, 3, 5, 24)
    default, row = get_format(name).quantize(x), get_format(name).quantize(x, scope=Scope.ROW)
    assert default.scope is Scope.ROW
    assert all(map(torch.equal, stored_tensors(default), stored_tensors(row)))


@pytest.mark.parametrize("shape", [(24,), (5, 24), (3, 5, 24)])
@pytest.mark.parametrize("scope", ["slot", "head"])
def test_a_tensor_of_fewer_axes_is_one_slot_and_one_head(shape, scope):
    x = draw_state(*shape)
    stored, whole = (get_format("nvfp4").quantize(x, scope=s) for s in (scope, "tensor"))
    assert stored.global_scale.shape == (1,) * len(shape)
    assert all(map(torch.equal, stored_tensors(stored), stored_tensors(whole)))


@pytest.mark.parametrize("scope", SCOPE_SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_along_d_v_are_blocks_along_d_k_of_the_transposed_tensor(name, scope):
    x = draw_state(2, 3, 17, 24)
    along_dv = get_format(name).quantize(x, dim=-2, scope=scope)
    transposed = get_format(name).quantize(x.mT, scope=scope)
    assert all(map(torch.equal, stored_tensors(along_dv), stored_tensors(transposed)))
    assert torch.equal(along_dv.dequantize(), transposed.dequantize().mT)
    assert along_dv.dequantize().is_contiguous()


def test_dim_counts_from_either_end():
    x = draw_state(2, 3, 5, 24)
    for front, back in ((3, -1), (2, -2)):
        a, b = (get_format("nvfp4").quantize(x, dim=dim) for dim in (front, back))
        assert a.dim == b.dim == back
        assert all(map(torch.equal, stored_tensors(a), stored_tensors(b)))


@pytest.mark.parametrize("scope", SCOPE_SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_nbytes_is_what_is_stored(name, scope):
    stored = get_format(name).quantize(draw_state(2, 3, 5, 17), scope=scope)
    assert stored.nbytes == sum(part.untyped_storage().nbytes() for part in stored_tensors(stored))


@pytest.mark.parametrize("name", FORMATS)
def test_nbytes_of_rows_is_bytes_per_row(name):
    fmt = get_format(name)
    assert fmt.quantize(draw_state(2, 3, 5, 17)).nbytes == 30 * fmt.bytes_per_row(17)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_shared_with_the_input_or_the_result(name):
    x = draw_state(2, 3, 4, 16)
    stored = get_format(name).quantize(x)
    before = stored.dequantize()
    x.zero_()
    stored.dequantize().zero_()
    assert torch.equal(stored.dequantize(), before)


@pytest.mark.parametrize("name", ["int16", "fp8", "fp8_e5m2", "int8"])
def test_32_elements_of_a_row_are_rows_of_their_own(name):
    x = draw_state(2, 3, 5, 80)
    stored = get_format(name).quantize(x, scope="1x32")
    assert stored.scales.shape == (2, 3, 5, 3)
    pieces = [get_format(name).quantize(x[..., i : i + 32]) for i in (0, 32, 64)]
    assert torch.equal(stored.codes, torch.cat([piece.codes for piece in pieces], dim=-1))
    assert torch.equal(stored.scales, torch.cat([piece.scales for piece in pieces], dim=-1))
    assert torch.equal(stored.dequantize(), torch.cat([piece.dequantize() for piece in pieces], dim=-1))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_block_scaled_formats_have_no_scope_of_32_elements(name):
    with pytest.raises(ValueError, match=f"^scope: expected tensor, slot, head or row for {name}, got 1x32$"):
        get_format(name).quantize(torch.ones(2, 64), scope="1x32")


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("fp8", {"convention": "decode"}),
        ("int8", {"convention": "encode_pow2"}),
        ("nvfp4", {"profile": "modelopt"}),
        ("nvfp4", {"profile": "torchao"}),
        ("nvfp4", {"block_choice": "mse_256"}),
        ("mxfp4", {"mx_rule": "floor"}),
        ("mxfp8", {"mx_rule": "even"}),
    ],
)
@pytest.mark.parametrize("scope", SCOPE_SHAPES)
def test_every_choice_reads_back_near_the_input_in_every_scope(name, choice, scope):
    x = draw_state(2, 3, 5, 40)
    x[0, 0, 0] = 0.0
    stored = get_format(name).quantize(x, scope=scope, arithmetic=Arithmetic(**choice))
    assert stored.arithmetic == Arithmetic(**choice)
    reference = x.abs().amax() if scope == "tensor" else x.abs().amax(-1, keepdim=True)
    if scope in ("slot", "head"):
        reference = x.abs().amax((2, 3) if scope == "head" else (1, 2, 3), keepdim=True)
    # clipping by floor and even adds at most 1/4 of the greatest magnitude to the spacing of E2M1
    assert ((stored.dequantize() - x).abs() <= 0.3 * reference).all()
    assert not stored.dequantize()[0, 0, 0].any()


@pytest.mark.parametrize(
    ("name", "choice", "argument"),
    [
        ("fp8", {"profile": "torchao"}, "profile"),
        ("bf16", {"convention": "decode"}, "convention"),
        ("nvfp4", {"mx_rule": "floor"}, "mx_rule"),
        ("mxfp4", {"block_choice": "mse_256"}, "block_choice"),
        ("int8", {"e2m1_random_bits": 8}, "e2m1_random_bits"),
    ],
)
def test_a_choice_that_a_format_does_not_have_is_refused(name, choice, argument):
    with pytest.raises(ValueError, match=f"^{argument}: expected the default for {name}"):
        get_format(name).quantize(torch.ones(2, 32), arithmetic=Arithmetic(**choice))


@pytest.mark.parametrize(
    ("choice", "argument"),
    [
        ({"profile": "nvidia"}, "profile"),
        ({"e2m1_random_bits": 12}, "e2m1_random_bits"),
        ({"profile": "modelopt", "block_choice": "mse_256"}, "block_choice"),
    ],
)
def test_arithmetic_that_does_not_exist_is_refused(choice, argument):
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        Arithmetic(**choice)


def test_arithmetic_says_what_is_not_the_default():
    assert str(Arithmetic()) == "default"
    assert str(Arithmetic(mx_rule="even")) == "mx_rule=even"


# Wide formats: half a unit in the last place, relative to the value. Scaled formats: relative to the greatest
# element of the row, half the widest gap over the greatest code: 16/448, 4096/57344, 1/254 and 1/6; for nvfp4
# also the 1/16 by which a block scale can be too small, for MX up to twice the gap, since the greatest element
# may lie just above half of the greatest code's value.
ERROR_BOUND = {
    "fp32": 0.0,
    "bf16": 2**-8,
    "fp16": 2**-11,
    "int16": 1 / 65534,
    "fp8": 16 / 448,
    "fp8_e5m2": 4096 / 57344,
    "int8": 1 / 254,
    "mxfp8": 32 / 448,
    "nvfp4": 1 / 6 + 1 / 16,
    "mxfp4": 2 / 6,
}


@pytest.mark.parametrize("name", FORMATS)
def test_error_is_within_the_spacing_of_the_format(name):
    x = draw_state(2, 3, 5, 64)
    error = (get_format(name).quantize(x).dequantize() - x).abs()
    reference = x.abs().amax(-1, keepdim=True) if get_format(name).scaled else x.abs()
    # 1e-6 for roundings of scale and product, in units of the value; int16 has a gap that small
    assert (error <= (ERROR_BOUND[name] * (1 + 1e-6) + 2**-23 * (name == "int16")) * reference).all()


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_nonfinite_input_names_format_slot_and_head(name, value, dim):
    x = draw_state(2, 3, 4, 16)
    x[1, 2, 3, 5] = value
    x[1, 2, 3, 6] = value
    expected = f"finite values for {name}, got {value} at slot 1, head 2, row 3, element 5 "
    with pytest.raises(ValueError, match=re.escape(expected) + r"\(x\[1, 2, 3, 5\]; 2 of 384 are not finite\)"):
        get_format(name).quantize(x, dim=dim)


def test_nonfinite_input_of_fewer_axes_is_in_slot_0_head_0():
    x = torch.zeros(2, 3, 16)
    x[1, 2, 7] = torch.nan
    with pytest.raises(ValueError, match=r"slot 0, head 0, row 5, element 7 \(x\[1, 2, 7\]; 1 of 96"):
        get_format("fp8").quantize(x)


@pytest.mark.parametrize(
    ("name", "values", "n_overflow"),
    [
        ("fp16", [65504.0, 65519.99, 65520.0, -1e5, 1.0], 2),
        ("bf16", [3.38e38, 3.3895e38, -3.4028235e38], 1),
        ("fp32", [3.4028235e38], 0),
        ("fp8", [1e30], 0),
        ("fp8_e5m2", [1e30], 0),
        ("int8", [1e30], 0),
        ("int16", [1e30], 0),
        ("mxfp8", [1e30], 0),
        ("nvfp4", [1e30], 0),
        ("mxfp4", [1e30], 0),
    ],
)
def test_overflow_is_counted(name, values, n_overflow):
    stored = get_format(name).quantize(torch.tensor([values]))
    assert stored.n_overflow == n_overflow
    assert int(stored.dequantize().isinf().sum()) == n_overflow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_16_bit_input_is_taken_as_its_float32_values(name, dtype):
    x = draw_state(1, 2, 4, 16).to(dtype)
    a, b = get_format(name).quantize(x), get_format(name).quantize(x.float())
    assert all(map(torch.equal, stored_tensors(a), stored_tensors(b)))


def test_input_that_requires_grad_is_detached():
    stored = get_format("nvfp4").quantize(torch.ones(2, 16, requires_grad=True))
    assert not stored.dequantize().requires_grad


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 16, dtype=torch.float64),
        torch.ones(2, 16, dtype=torch.int32),
        np.ones((2, 16), np.float32),
        torch.tensor(1.0),
        torch.ones(0, 16),
        torch.ones(1, 1, 1, 2, 16),
    ],
)
def test_input_that_is_no_state_is_refused(x):
    with pytest.raises(ValueError, match=r"^x: expected"):
        get_format("nvfp4").quantize(x)


@pytest.mark.parametrize(("x", "dim"), [(torch.ones(2, 3, 4, 16), 0), (torch.ones(2, 16), 2), (torch.ones(16), -2)])
def test_a_block_axis_that_is_not_one_of_the_last_two_is_refused(x, dim):
    with pytest.raises(ValueError, match=f"^dim: expected one of the last two axes of .*, got {dim}$"):
        get_format("nvfp4").quantize(x, dim=dim)


def test_an_unknown_scope_is_refused():
    with pytest.raises(ValueError, match=r"^scope: expected one of tensor, slot, head, row, 1x32, got 'block'$"):
        get_format("nvfp4").quantize(torch.ones(2, 16), scope="block")


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match=r"^rounding: expected one of nearest, stochastic, got 'up'$"):
        get_format("nvfp4").quantize(torch.ones(2, 16), rounding="up")


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.stochastic])
def test_formats_without_stochastic_rounding_refuse_it(name):
    with pytest.raises(ValueError, match=f"^rounding: expected nearest for {name}, got stochastic$"):
        get_format(name).quantize(torch.ones(2, 16), rounding="stochastic", seed=1)


def test_stochastic_rounding_wants_a_seed():
    with pytest.raises(ValueError, match=r"^seed: expected an int for stochastic rounding, got None$"):
        get_format("fp8").quantize(torch.ones(2, 16), rounding="stochastic")
