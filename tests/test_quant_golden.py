"""Every stored vector of the formats, bit for bit; other implementations computed tests/golden/quant."""

from pathlib import Path

import numpy as np
import pytest
import torch

from driftgate.quant import Arithmetic, get_format, swizzle_scales, unswizzle_scales
from driftgate.quant.codecs import CODECS, cast_e2m1, cast_e4m3, cast_e5m2, decode_rows, encode_rows
from driftgate.quant.oracle import E2M1, E4M3, E5M2, ELEMENTS

GOLDEN = Path(__file__).parent / "golden" / "quant"


def load(name):
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


TABLES, CASTS, NVFP4, ROWS, STATE = map(load, ("tables", "cast_f32", "nvfp4", "scaled_rows", "state_scaled"))
FOUR_OVER_SIX, SWIZZLE = map(load, ("nvfp4_4over6", "swizzle128x4"))
NVFP4_CASES = sorted({key.split("/")[0] for key in NVFP4})
PROFILE_CASES = sorted({key.rsplit("/", 1)[0] for key in NVFP4 if "/modelopt/" in key or "/torchao/" in key})
ROW_CASES = sorted({key.rsplit("/", 1)[0] for key in ROWS if key.count("/") == 3})


def assert_same_bits(got, expected):
    """Equal shape, dtype and bits: the sign of zero counts."""
    got = np.ascontiguousarray(got)
    expected = np.ascontiguousarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def test_e4m3_values():
    decoded = decode_rows(get_format("fp8"), torch.arange(256, dtype=torch.uint8)[None], None, torch.ones(1), 256)
    nan = np.isnan(TABLES["e4m3fn_values"])
    assert_same_bits(np.isnan(decoded[0].numpy()), nan)
    assert_same_bits(decoded[0].numpy()[~nan], TABLES["e4m3fn_values"][~nan])


def test_e2m1_values_of_every_packed_byte():
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8)
    one = torch.full((32, 1), 0x38, dtype=torch.uint8)
    decoded = decode_rows(get_format("nvfp4"), codes, one, torch.ones(32), 16).numpy()
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    assert_same_bits(decoded.reshape(256, 2)[:, 0], TABLES["e2m1_values"][low])
    assert_same_bits(decoded.reshape(256, 2)[:, 1], TABLES["e2m1_values"][high])


@pytest.mark.parametrize(("element", "table"), [(E2M1, "e2m1_values"), (E4M3, "e4m3fn_values"), (E5M2, "e5m2_values")])
def test_oracle_values(element, table):
    values = np.array([element.value(code) for code in range(len(TABLES[table]))], np.float32)
    np.testing.assert_array_equal(values, TABLES[table])
    assert_same_bits(np.signbit(values), np.signbit(TABLES[table]))


@pytest.mark.parametrize(
    ("cast", "table"), [(cast_e4m3, "e4m3fn_sat"), (cast_e5m2, "e5m2_sat"), (cast_e2m1, "e2m1_sat")]
)
def test_cast_of_every_float16(cast, table):
    x = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    number = ~np.isnan(x)
    assert_same_bits(cast(torch.from_numpy(x[number])).numpy(), TABLES[f"f16_to_{table}"][number])


@pytest.mark.parametrize(
    ("cast", "table"), [(cast_e4m3, "e4m3fn_sat"), (cast_e5m2, "e5m2_sat"), (cast_e2m1, "e2m1_sat")]
)
def test_cast_of_ties_and_their_neighbours(cast, table):
    number = ~np.isnan(CASTS["x"])
    assert_same_bits(cast(torch.from_numpy(CASTS["x"][number])).numpy(), CASTS[table][number])


@pytest.mark.parametrize(
    ("name", "table"),
    [("fp8", "e4m3fn_sat"), ("fp8_e5m2", "e5m2_sat"), ("nvfp4", "e2m1_sat"), ("bf16", "bf16"), ("fp16", "f16")],
)
def test_oracle_cast_of_ties_and_their_neighbours(name, table):
    codes = [ELEMENTS[name].nearest(float(x)) for x in CASTS["x"]]
    number = ~np.isnan(CASTS["x"])
    np.testing.assert_array_equal(np.array(codes)[number], CASTS[table][number])


@pytest.mark.parametrize(("name", "table"), [("bf16", "bf16"), ("fp16", "f16")])
def test_wide_casts(name, table):
    x = torch.from_numpy(CASTS["x"])
    codes = encode_rows(get_format(name), x[None], nonfinite="saturate").codes[0]
    number = ~np.isnan(CASTS["x"])
    assert_same_bits(codes.view(torch.uint16).numpy()[number], CASTS[table][number])
    assert codes[-1].isnan()


@pytest.mark.parametrize("case", NVFP4_CASES)
def test_nvfp4(case):
    golden = {key.rsplit("/", 1)[1]: NVFP4[key] for key in NVFP4 if key.startswith(f"{case}/te/")}
    scope = "row" if case == "row_scope" else "tensor"
    x = NVFP4[f"{case}/x"]
    stored = get_format("nvfp4").quantize(torch.from_numpy(x), scope=scope)
    assert_same_bits(stored.amax.numpy().reshape(golden["amax"].shape), golden["amax"])
    assert_same_bits(stored.global_scale.numpy().reshape(golden["s2"].shape), golden["s2"])
    assert_same_bits(stored.scales.numpy(), golden["s8"])
    assert_same_bits(stored.codes.numpy(), golden["packed"])
    assert_same_bits(stored.dequantize().numpy(), golden["deq"])


@pytest.mark.parametrize(
    ("scope", "axis"),
    [("row", "dk"), *((scope, axis) for scope in ("tensor", "slot", "head") for axis in ("dk", "dv"))],
)
def test_nvfp4_of_a_state(scope, axis):
    prefix = f"nvfp4/{scope}/{axis}/"
    stored = get_format("nvfp4").quantize(torch.from_numpy(STATE["x"]), dim=-1 if axis == "dk" else -2, scope=scope)
    assert_same_bits(stored.amax.numpy().reshape(STATE[prefix + "amax"].shape), STATE[prefix + "amax"])
    assert_same_bits(stored.global_scale.numpy().reshape(STATE[prefix + "s2"].shape), STATE[prefix + "s2"])
    assert_same_bits(stored.scales.numpy(), STATE[prefix + "s8"])
    assert_same_bits(stored.codes.numpy(), STATE[prefix + "packed"])
    assert_same_bits(stored.dequantize().numpy(), STATE[prefix + "deq"])


NAMES = {"e4m3": "fp8", "e5m2": "fp8_e5m2", "int8": "int8", "int16": "int16"}
SCALED_STATE = sorted({key.rsplit("/", 1)[0] for key in STATE if key.split("/")[0] in NAMES})


@pytest.mark.parametrize("prefix", SCALED_STATE)
def test_scaled_formats_of_a_state(prefix):
    kind, scope, convention = prefix.split("/")
    stored = get_format(NAMES[kind]).quantize(
        torch.from_numpy(STATE["x"]), scope=scope, arithmetic=Arithmetic(convention=convention)
    )
    assert_same_bits(stored.codes.numpy(), STATE[f"{prefix}/codes"])
    assert_same_bits(stored.scales.numpy(), STATE[f"{prefix}/scale"])
    if f"{prefix}/deq" in STATE:
        assert_same_bits(stored.dequantize().numpy(), STATE[f"{prefix}/deq"])


@pytest.mark.parametrize("prefix", ROW_CASES)
def test_scaled_rows(prefix):
    case, kind, convention = prefix.split("/")
    stored = get_format(NAMES[kind]).quantize(
        torch.from_numpy(ROWS[f"{case}/x"]), arithmetic=Arithmetic(convention=convention)
    )
    assert_same_bits(stored.codes.numpy(), ROWS[f"{prefix}/codes"])
    assert_same_bits(stored.scales.numpy(), ROWS[f"{prefix}/scale"])


@pytest.mark.parametrize("name", ["int8", "int16"])
def test_ties_go_to_the_even_integer(name):
    stored = encode_rows(get_format(name), torch.from_numpy(ROWS[f"ties_{name}/x"]))
    assert_same_bits(stored.codes.numpy(), ROWS[f"ties_{name}/codes"])
    assert_same_bits(stored.row_scales[:, None].numpy(), ROWS[f"ties_{name}/scale"])


@pytest.mark.parametrize("case", PROFILE_CASES)
def test_nvfp4_profiles_of_other_libraries(case):
    x, profile = NVFP4[case.split("/")[0] + "/x"], case.split("/")[1]
    stored = get_format("nvfp4").quantize(torch.from_numpy(x), scope="tensor", arithmetic=Arithmetic(profile=profile))
    assert_same_bits(stored.global_scale.numpy().reshape(NVFP4[f"{case}/s2"].shape), NVFP4[f"{case}/s2"])
    assert_same_bits(stored.scales.numpy(), NVFP4[f"{case}/s8"])
    assert_same_bits(stored.codes.numpy(), NVFP4[f"{case}/packed"])


@pytest.mark.parametrize("case", sorted({key.rsplit("/", 1)[0] for key in FOUR_OVER_SIX if key.count("/") == 2}))
def test_nvfp4_with_four_over_six(case):
    x, choice = FOUR_OVER_SIX[case.split("/")[0] + "/x"], case.split("/")[1].lower()
    arithmetic = Arithmetic(block_choice=choice)
    stored = get_format("nvfp4").quantize(torch.from_numpy(x), scope="tensor", arithmetic=arithmetic)
    assert_same_bits(stored.global_scale.numpy().reshape(1), FOUR_OVER_SIX[f"{case}/s2"])
    assert_same_bits(stored.scales.numpy(), FOUR_OVER_SIX[f"{case}/s8"])
    assert_same_bits(stored.codes.numpy(), FOUR_OVER_SIX[f"{case}/packed"])


@pytest.mark.parametrize("choice", ["MSE_256", "MAE_256", "MSE_448"])
def test_four_over_six_picks_both(choice):
    picked = FOUR_OVER_SIX[f"normal_s1/{choice}/pick4"]
    assert picked.any()
    assert not picked.all()


@pytest.mark.parametrize("case", sorted({key.split("/")[0] for key in SWIZZLE}))
def test_swizzled_scales(case):
    linear = torch.from_numpy(SWIZZLE[f"{case}/linear"])
    swizzled = swizzle_scales(linear)
    assert_same_bits(swizzled.numpy(), SWIZZLE[f"{case}/swizzled"])
    assert torch.equal(unswizzle_scales(swizzled, *linear.shape), linear)


def test_row_codec_and_whole_tensor_agree_on_a_state():
    x = torch.from_numpy(STATE["x"])
    for name in CODECS:
        fmt = get_format(name)
        rows, whole = encode_rows(fmt, x), fmt.quantize(x)
        assert_same_bits(rows.codes.view(torch.uint8).numpy(), whole.codes.view(torch.uint8).numpy())
        assert_same_bits(decode_rows(fmt, *rows, 64).numpy(), whole.dequantize().numpy())
