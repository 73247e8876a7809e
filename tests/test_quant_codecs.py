"""The fast codecs against the oracle and ml_dtypes on random data, and what a state pool relies on."""

import ml_dtypes
import numpy as np
import pytest
import torch

from driftgate.quant import FORMATS, decode_rows, encode_rows, find_nonfinite_rows, get_format
from driftgate.quant.codecs import cast_e2m1, cast_e4m3
from driftgate.quant.oracle import decode_row, encode_row, pack_nibbles

PACKED = ("nvfp4", "mxfp4")
STABLE = ("fp32", "bf16", "fp16", "int16", "fp8", "fp8_e5m2", "int8")
ROW_LENGTHS = (1, 15, 16, 17, 24, 40, 64, 80)
FINITE_TOP = 0x7F7FFFFF  # bits of FLT_MAX
NEGATIVE_NAN = np.uint32(0xFFC00000).view(np.float32)
BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


def draw(kind, shape, seed=0):
    """Float32 data of one kind; every row also has a zero and a negative zero where it is long enough."""
    rng = np.random.default_rng([seed, len(kind), shape[-1]])
    if kind == "normal":
        x = rng.standard_normal(shape).astype(np.float32)
    elif kind == "wide":  # magnitudes over 2^-40 .. 1 next to each other
        x = (rng.choice([-1.0, 1.0], shape) * 2.0 ** rng.uniform(-40, 0, shape)).astype(np.float32)
    elif kind == "blocks":  # each 16-block has a size of its own: block scales over all of E4M3
        size = np.repeat(2.0 ** rng.uniform(-24, 0, (*shape[:-1], -(-shape[-1] // 16))), 16, axis=-1)
        x = (rng.standard_normal(shape) * size[..., : shape[-1]]).astype(np.float32)
    elif kind == "grid":  # small integers: ties everywhere
        x = rng.integers(-24, 25, shape).astype(np.float32) / 4
    else:  # every finite float32, subnormals included
        x = rng.integers(0, FINITE_TOP + 1, shape).astype(np.uint32).view(np.float32)
        x = x * rng.choice(np.array([-1, 1], np.float32), shape)
    if shape[-1] > 2:
        x[..., -1], x[..., -2] = -0.0, 0.0
    return x


KINDS = ("normal", "wide", "blocks", "grid", "any bits")


def code_bits(fmt, codes):
    """Codes as unsigned integers."""
    return (codes.view(BITS[codes.dtype]) if codes.dtype in BITS else codes).numpy().astype(np.int64)


def assert_row_is_the_oracle_s(name, x, stored, i):
    expected = encode_row(name, x[i])
    codes = pack_nibbles(expected.codes) if name in PACKED else expected.codes
    np.testing.assert_array_equal(code_bits(get_format(name), stored.codes[i]), codes)
    if expected.block_scales is not None:
        np.testing.assert_array_equal(stored.block_scales[i].numpy(), expected.block_scales)
    if expected.scale is not None:
        assert stored.row_scales[i].numpy().tobytes() == expected.scale.tobytes()
    decoded = decode_rows(get_format(name), *stored, x.shape[-1])[i].numpy()
    oracle = decode_row(name, expected, x.shape[-1])
    assert np.where(np.isnan(decoded), 0, decoded).tobytes() == np.where(np.isnan(oracle), 0, oracle).tobytes()
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(oracle))


# 448*bmax/amax lies exactly between two E4M3 values, so the order of the roundings decides: bmax*(S*(1/6))
# gives these codes; (bmax*(1/6))*S and S*(bmax/6), which others use, give neighbours of some.
@pytest.mark.parametrize(
    ("amax", "bmax", "code"), [(12, 9, 123), (24, 9, 115), (28, 25, 124), (56, 25, 116), (96, 72, 123)]
)
def test_order_of_operations_in_the_block_scale(amax, bmax, code):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = amax, bmax
    assert encode_rows(get_format("nvfp4"), x).block_scales[0].tolist() == [0x7E, code]
    assert encode_row("nvfp4", x[0].numpy()).block_scales == [0x7E, code]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_scale_is_the_oracle_s(name, kind):
    for d_k in ROW_LENGTHS:
        x = draw(kind, (3, d_k))
        stored = encode_rows(get_format(name), torch.from_numpy(x))
        for i in range(len(x)):
            assert_row_is_the_oracle_s(name, x, stored, i)


@pytest.mark.parametrize("name", FORMATS)
def test_nonfinite_elements_saturate_their_own_code_only(name):
    x = draw("normal", (6, 40))
    x[0, 3] = np.nan
    x[1, 3], x[1, 20] = np.inf, -np.inf
    x[2, 17] = NEGATIVE_NAN
    x[3, :] = np.nan
    x[4, 16:32] = -np.inf
    stored = encode_rows(get_format(name), torch.from_numpy(x), nonfinite="saturate")
    nan = np.isnan(x) & (name in ("bf16", "fp16", "fp32"))  # any NaN code is right there
    for i in range(len(x)):
        if nan[i].any():
            assert stored.codes[i].isnan().numpy().tobytes() == nan[i].tobytes()
        else:
            assert_row_is_the_oracle_s(name, x, stored, i)


def test_what_nonfinite_elements_become():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    x[0, 4] = float(NEGATIVE_NAN)
    fp8 = encode_rows(get_format("fp8"), x, nonfinite="saturate").codes[0]
    assert fp8[:5].tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0x7F]
    mxfp8 = encode_rows(get_format("mxfp8"), x, nonfinite="saturate").codes[0]
    assert mxfp8[:5].tolist() == [0x7F, 0x7E, 0xFE, 0x78, 0x7F]
    e5m2 = encode_rows(get_format("fp8_e5m2"), x, nonfinite="saturate").codes[0]
    assert e5m2[:5].tolist() == [0x7F, 0x7B, 0xFB, 0x7B, 0x7F]
    for name, top in (("int8", 127), ("int16", 32767)):
        codes = encode_rows(get_format(name), x, nonfinite="saturate").codes[0]
        assert codes[:5].tolist() == [top, top, -top, top, top]
    nvfp4 = encode_rows(get_format("nvfp4"), x, nonfinite="saturate").codes[0]
    assert nvfp4[:3].tolist() == [0x77, 0x7F, 0x07]
    mxfp4 = encode_rows(get_format("mxfp4"), x, nonfinite="saturate").codes[0]
    assert mxfp4[:3].tolist() == [0x77, 0x6F, 0x07]  # 1 is stored as 4 * 2^-2


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.scaled])
def test_a_nonfinite_element_leaves_the_scales_alone(name):
    x = torch.from_numpy(draw("normal", (4, 64)))
    x[2, 5] = 0.0
    clean = encode_rows(get_format(name), x)
    x[2, 5] = torch.nan
    dirty = encode_rows(get_format(name), x, nonfinite="saturate")
    for got, expected in zip(dirty[1:], clean[1:], strict=True):
        assert expected is None or torch.equal(got, expected)


def test_nonfinite_rows_are_found():
    x = torch.zeros(2, 3, 4, 8)
    x[1, 2, 3, 4], x[0, 1, 0, 0] = torch.nan, -torch.inf
    assert find_nonfinite_rows(x).nonzero().tolist() == [[0, 1, 0], [1, 2, 3]]


def test_finite_rows_of_any_size_are_not_reported():
    assert not find_nonfinite_rows(torch.from_numpy(draw("any bits", (50, 33)))).any()


def test_nonfinite_elements_raise_by_default():
    x = torch.zeros(2, 3, 4, 8)
    x[1, 2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"nvfp4, got nan at slot 1, head 2, row 3, element 4"):
        encode_rows(get_format("nvfp4"), x)


@pytest.mark.parametrize("seed", range(3))
def test_e4m3_cast_is_that_of_ml_dtypes(seed):
    x = draw("any bits", (100_000,), seed) if seed else draw("wide", (100_000,)) * np.float32(1000)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(cast_e4m3(torch.from_numpy(x)).numpy(), expected)


@pytest.mark.parametrize("seed", range(3))
def test_e2m1_cast_is_that_of_ml_dtypes(seed):
    x = draw("any bits", (100_000,), seed) if seed else draw("wide", (100_000,)) * np.float32(8)
    expected = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(cast_e2m1(torch.from_numpy(x)).numpy(), expected)


def test_bf16_codes_are_those_of_ml_dtypes():
    x = draw("any bits", (4, 50_000))
    codes = encode_rows(get_format("bf16"), torch.from_numpy(x)).codes
    np.testing.assert_array_equal(codes.view(torch.uint16).numpy(), x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_fp16_codes_are_those_of_numpy():
    x = draw("wide", (4, 50_000)) * np.float32(2.0**17)
    codes = encode_rows(get_format("fp16"), torch.from_numpy(x)).codes
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    assert np.isinf(expected).any()
    np.testing.assert_array_equal(codes.view(torch.uint16).numpy(), expected.view(np.uint16))


def test_fp32_is_exact():
    x = torch.from_numpy(draw("any bits", (4, 64)))
    assert torch.equal(decode_rows(get_format("fp32"), *encode_rows(get_format("fp32"), x), 64), x)


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("int")])
def test_the_sign_of_zero_is_kept(name):
    x = torch.tensor([[-0.0, 0.0, 1.0, -1e-30]])
    fmt = get_format(name)
    stored = encode_rows(fmt, x)
    assert decode_rows(fmt, *stored, 4)[0, [0, 1, 3]].signbit().tolist() == [True, False, True]
    if fmt.bits < 16:
        assert stored.codes[0, 0] == (0x08 if name in PACKED else 0x80)


@pytest.mark.parametrize("name", ["int8", "int16"])
def test_integers_have_no_negative_zero(name):
    fmt = get_format(name)
    stored = encode_rows(fmt, torch.tensor([[-0.0, -1e-30, 1.0]]))
    assert stored.codes[0, :2].tolist() == [0, 0]
    assert not decode_rows(fmt, *stored, 3).signbit().any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_zeros_decodes_to_zeros_with_finite_scales(name):
    fmt = get_format(name)
    stored = encode_rows(fmt, torch.zeros(2, 17))
    assert torch.equal(decode_rows(fmt, *stored, 17), torch.zeros(2, 17))
    if fmt.scope_scaled:
        assert torch.equal(stored.row_scales, torch.ones(2))
    if fmt.block_scaled:
        assert not stored.block_scales.any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_other_rows_or_on_strides(name):
    fmt = get_format(name)
    x = torch.from_numpy(draw("blocks", (2, 3, 5, 24)))
    together = encode_rows(fmt, x)
    strided = encode_rows(fmt, x.transpose(-1, -2).contiguous().transpose(-1, -2))
    alone = [encode_rows(fmt, row[None]) for row in x.flatten(0, 2)]
    for part, part_strided, parts in zip(together, strided, zip(*alone, strict=True), strict=True):
        if part is not None:
            assert torch.equal(part, part_strided)
            assert torch.equal(part.flatten(0, 2), torch.cat(parts))


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_and_dtypes_for_any_leading_axes(name):
    fmt = get_format(name)
    for leading in ((), (3,), (2, 3, 4), (0, 4)):
        codes, block_scales, row_scales = stored = encode_rows(fmt, torch.ones(*leading, 17))
        assert codes.dtype == fmt.storage_dtype
        assert codes.shape == (*leading, fmt.codes_per_row(17))
        assert (block_scales is not None) == fmt.block_scaled
        assert (row_scales is not None) == fmt.scope_scaled
        if block_scales is not None:
            assert (block_scales.dtype, block_scales.shape) == (torch.uint8, (*leading, fmt.blocks_per_row(17)))
        if row_scales is not None:
            assert (row_scales.dtype, row_scales.shape) == (torch.float32, leading)
        assert decode_rows(fmt, *stored, 17).shape == (*leading, 17)


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_leaves_its_input_alone(name):
    x = torch.from_numpy(draw("normal", (4, 40)))
    before = x.clone()
    encode_rows(get_format(name), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", STABLE)
def test_codes_of_decoded_values_are_the_same_codes(name):
    # Scaled: the greatest code of a row is Q, so amax comes back as Q*scale: the new scale is the old one to an ulp
    # or two, and x*e lies within 1e-6 of a code value (1e-2 for the greatest of int16), nowhere near a midpoint.
    fmt = get_format(name)
    x = torch.from_numpy(draw("wide" if fmt.scaled else "normal", (200, 40)))
    first = encode_rows(fmt, x)
    again = encode_rows(fmt, decode_rows(fmt, *first, 40))
    assert torch.equal(first.codes, again.codes)


def test_nvfp4_codes_are_stable_where_the_block_scale_is_a_normal_e4m3():
    # A normal E4M3 scale is off by at most 1/16, so the block maximum is coded 6 and comes back as 6*d. A
    # subnormal scale can be off by a third, the maximum is then coded 4 and the block shrinks when it is
    # stored again; a block whose scale underflows to 0 has codes ±6 once and ±0 afterwards.
    fmt = get_format("nvfp4")
    x = torch.from_numpy(draw("blocks", (500, 64)))
    first = encode_rows(fmt, x)
    again = encode_rows(fmt, decode_rows(fmt, *first, 64))
    stable = first.block_scales >= 0x08
    changed_scale = first.block_scales != again.block_scales
    changed_codes = (first.codes != again.codes).view(500, 4, 8).any(-1)
    assert not (changed_scale & stable).any()
    assert not (changed_codes & stable).any()
    assert changed_codes[~stable].any()


def test_codes_of_another_format_are_refused():
    stored = encode_rows(get_format("fp8"), torch.ones(2, 16))
    with pytest.raises(ValueError, match=r"codes: expected uint8 \[\.\.\., 8\] for nvfp4 rows of 16"):
        decode_rows(get_format("nvfp4"), stored.codes, None, stored.row_scales, 16)


@pytest.mark.parametrize("missing", ["block_scales", "row_scales"])
def test_a_missing_scale_is_refused(missing):
    stored = encode_rows(get_format("nvfp4"), torch.ones(2, 16))._replace(**{missing: None})
    with pytest.raises(ValueError, match=f"^{missing}: expected a tensor for nvfp4, got None"):
        decode_rows(get_format("nvfp4"), *stored, 16)


def test_a_scale_that_a_format_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"^row_scales: expected None for fp32, got a tensor"):
        decode_rows(get_format("fp32"), torch.ones(2, 16), None, torch.ones(2), 16)


@pytest.mark.parametrize("x", [torch.ones(2, 16, dtype=torch.float64), torch.ones(2, 0), torch.tensor(1.0)])
def test_input_that_is_no_float32_row_is_refused(x):
    with pytest.raises(ValueError, match=r"^x: expected float32"):
        encode_rows(get_format("fp8"), x)


def test_an_unknown_rule_for_nonfinite_elements_is_refused():
    with pytest.raises(ValueError, match=r"^nonfinite: expected 'raise' or 'saturate', got 'ignore'"):
        encode_rows(get_format("fp8"), torch.ones(2, 16), nonfinite="ignore")
