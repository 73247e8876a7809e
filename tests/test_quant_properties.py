"""What every format keeps whatever the numbers are: order, signs, range, powers of two, and its own codes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from driftgate.quant import FORMATS, decode_rows, encode_rows, get_format

SCALED = [name for name, fmt in FORMATS.items() if fmt.scaled]
# Codes of what a row reads back as: see test_what_is_read_back_is_stored_as_the_same_codes.
STABLE = [name for name, fmt in FORMATS.items() if not fmt.block_scaled]
LEAST_NORMAL_SCALE = 0x08  # 2^-6 in E4M3
CHECKED = settings(max_examples=30, deadline=None, derandomize=True, database=None)


@st.composite
def rows(draw, *, exponents=(-40, 40), lengths=(1, 70)):
    """One or two rows of float32 over a range of exponents, zeros of both signs among them."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(*lengths)))
    mantissa = draw(npst.arrays(np.int32, shape, elements=st.integers(1 - 2**24, 2**24 - 1)))
    exponent = draw(npst.arrays(np.int32, shape, elements=st.integers(*exponents)))
    zero = np.where(exponent % 2, np.float32(-0.0), np.float32(0.0))
    return torch.from_numpy(np.where(mantissa == 0, zero, np.ldexp(mantissa, exponent - 23)).astype(np.float32))


def within_range(fmt, x):
    """Rows without what overflows to infinity in a format that has no scale."""
    return x if fmt.scaled else x.clamp(-fmt.max_value, fmt.max_value)


def round_trip(fmt, x):
    return decode_rows(fmt, *encode_rows(fmt, x), x.shape[-1])


def blocks(fmt, x):
    """Pieces of rows within which one scale holds."""
    size = fmt.block or x.shape[-1]
    return [x[:, i : i + size] for i in range(0, x.shape[-1], size)]


@pytest.mark.parametrize("name", FORMATS)
@given(x=rows())
@CHECKED
def test_order_is_kept_where_one_scale_holds(name, x):
    fmt = get_format(name)
    x = within_range(fmt, x)
    for before, after in zip(blocks(fmt, x), blocks(fmt, round_trip(fmt, x)), strict=True):
        order = before.argsort(dim=-1)
        assert (after.gather(-1, order).diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("name", FORMATS)
@given(x=rows())
@CHECKED
def test_no_sign_changes(name, x):
    read = round_trip(get_format(name), x)
    if name.startswith("int"):
        assert not ((read != 0) & (read.signbit() != x.signbit())).any()
    else:
        assert torch.equal(read.signbit(), x.signbit())


@pytest.mark.parametrize("name", FORMATS)
@given(x=rows())
@CHECKED
def test_the_negative_of_a_row_is_stored_as_its_negative(name, x):
    fmt = get_format(name)
    assert torch.equal(round_trip(fmt, -x), -round_trip(fmt, x))
    for a, b in zip(encode_rows(fmt, -x)[1:], encode_rows(fmt, x)[1:], strict=True):
        assert a is b or torch.equal(a, b)


@pytest.mark.parametrize("name", SCALED)
@given(x=rows(exponents=(-30, 30)), power=st.integers(-30, 30))
@CHECKED
def test_a_power_of_two_goes_into_the_scales_alone(name, x, power):
    # Products and quotients with powers of two are exact in this range, so every code is the same.
    fmt = get_format(name)
    first, second = encode_rows(fmt, x), encode_rows(fmt, x * 2.0**power)
    zero = x.abs().amax(-1) == 0  # their scale is 1
    if name.startswith("mx"):
        used = first.block_scales != 0
        assert torch.equal(second.block_scales[used].int(), first.block_scales[used].int() + power)
    else:
        assert torch.equal(second.row_scales[~zero], first.row_scales[~zero] * 2.0**power)
    assert torch.equal(first.codes, second.codes)


@pytest.mark.parametrize("name", SCALED)
@given(x=rows(exponents=(-126, 126)))
@CHECKED
def test_no_code_is_beyond_the_greatest(name, x):
    fmt = get_format(name)
    codes, block_scales, row_scales = encode_rows(fmt, x)
    if name.startswith("int"):
        assert int(codes.int().abs().max()) <= fmt.max_value
    elif fmt.elements_per_code == 1:
        assert int((codes & 0x7F).max()) <= {"fp8_e5m2": 0x7B}.get(name, 0x7E)
    assert row_scales is None or bool((row_scales.isfinite() & (row_scales > 0)).all())
    assert block_scales is None or int(block_scales.max()) <= (254 if name.startswith("mx") else 0x7E)
    assert decode_rows(fmt, codes, block_scales, row_scales, x.shape[-1]).isfinite().all()


@pytest.mark.parametrize("name", STABLE)
@given(x=rows())
@CHECKED
def test_what_is_read_back_is_stored_as_the_same_codes(name, x):
    # The greatest element of a row has the greatest code Q and reads back as Q*scale, so the new scale is the old
    # one to an ulp or two, and no element comes near the middle between two codes. The scale itself may move.
    fmt = get_format(name)
    first = encode_rows(fmt, within_range(fmt, x))
    again = encode_rows(fmt, decode_rows(fmt, *first, x.shape[-1]))
    assert torch.equal(first.codes, again.codes)


@given(x=rows(lengths=(16, 70), exponents=(-6, 6)))
@CHECKED
def test_nvfp4_codes_stay_in_blocks_with_a_normal_scale(x):
    # Below 2^-6 a block scale is off by up to a third or 0 and the block's greatest code need not be 6.
    fmt = get_format("nvfp4")
    first = encode_rows(fmt, x)
    again = encode_rows(fmt, decode_rows(fmt, *first, x.shape[-1]))
    normal = first.block_scales >= LEAST_NORMAL_SCALE
    assert torch.equal(first.block_scales[normal], again.block_scales[normal])
    moved = (first.codes != again.codes).unflatten(-1, (-1, 8)).any(-1)
    assert not (moved & normal).any()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@given(x=rows())
@CHECKED
def test_mx_values_stay(name, x):
    # Where the greatest element of a block is coded as half of the greatest code, the block's exponent goes down by
    # one and the codes double; the values are the same.
    fmt = get_format(name)
    read = round_trip(fmt, x)
    assert torch.equal(round_trip(fmt, read), read)


@pytest.mark.parametrize("name", [name for name in SCALED if name != "nvfp4"])
@given(x=rows(exponents=(-20, 20)))
@CHECKED
def test_the_greatest_of_a_scale_is_within_half_a_step(name, x):
    fmt = get_format(name)
    half = {
        "int8": 0.5 / 127,
        "int16": 0.5 / 32767,
        "fp8": 2.0**-4,
        "fp8_e5m2": 2.0**-3,
        "mxfp8": 2.0**-4,
        "mxfp4": 0.25,
    }
    for before, after in zip(blocks(fmt, x), blocks(fmt, round_trip(fmt, x)), strict=True):
        greatest, where = before.abs().max(dim=-1, keepdim=True)
        error = (after.gather(-1, where) - before.gather(-1, where)).abs()
        assert (error <= half[name] * greatest * (1 + 2**-20)).all()
