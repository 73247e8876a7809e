"""MX formats: every stored vector bit for bit, the four rules for exponents, and what E8M0 codes mean."""

from pathlib import Path

import numpy as np
import pytest
import torch

from driftgate.quant import Arithmetic, MxRule, decode_rows, encode_rows, get_format
from driftgate.quant.codec_mx import choose_exponents, mx_codec
from driftgate.quant.codecs import CODECS
from driftgate.quant.elements import E2M1, E4M3, E5M2, look_up

GOLDEN = Path(__file__).parent / "golden" / "quant"
ELEMENTS = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}
FLT_MIN, FLT_MAX = 2.0**-126, torch.finfo(torch.float32).max
# Any element type has a codec; formats are made of two of them.
MX_CODECS = {"e2m1": CODECS["mxfp4"], "e4m3": CODECS["mxfp8"], "e5m2": mx_codec(E5M2, "e5m2")}


def load(name):
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


MX, EDGES = load("mx"), load("mx_scale_edges")
CASES = sorted({key.rsplit("/", 1)[0] for key in MX if key.count("/") == 3})


def assert_same_bits(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("case", CASES)
def test_stored_blocks(case):
    name, kind, rule = case.split("/")
    x = torch.from_numpy(MX[f"{name}/x"])
    codec = MX_CODECS[kind]
    codes, scales, nothing = codec.encode(x, x.abs().amax(-1, keepdim=True), Arithmetic(mx_rule=rule), None)
    assert nothing is None
    assert_same_bits(scales.numpy(), MX[f"{case}/scale"])
    for part in ("codes", "packed"):
        if f"{case}/{part}" in MX:
            assert_same_bits(codes.numpy(), MX[f"{case}/{part}"])
    if f"{case}/deq" in MX:
        assert_same_bits(codec.decode(codes, scales, None, x.shape[-1]).numpy(), MX[f"{case}/deq"])


@pytest.mark.parametrize(("kind", "name"), [("e2m1", "mxfp4"), ("e4m3", "mxfp8")])
@pytest.mark.parametrize("rule", [rule.value for rule in MxRule])
def test_quantize_stores_the_same(kind, name, rule):
    for case in ("normal_s1", "wide_range", "pad_n40"):
        stored = get_format(name).quantize(torch.from_numpy(MX[f"{case}/x"]), arithmetic=Arithmetic(mx_rule=rule))
        assert_same_bits(stored.scales.numpy(), MX[f"{case}/{kind}/{rule}/scale"])
        part = "packed" if kind == "e2m1" else "codes"
        assert_same_bits(stored.codes.numpy(), MX[f"{case}/{kind}/{rule}/{part}"])


def test_the_default_rule_is_rceil():
    x = torch.from_numpy(MX["normal_s1/x"])
    assert_same_bits(encode_rows(get_format("mxfp4"), x).block_scales.numpy(), MX["normal_s1/e2m1/rceil/scale"])


@pytest.mark.parametrize("rule", [rule.value for rule in MxRule])
@pytest.mark.parametrize("kind", ELEMENTS)
def test_exponents_next_to_thresholds(kind, rule):
    got = choose_exponents(torch.from_numpy(EDGES["amax"]), ELEMENTS[kind], MxRule(rule))
    assert_same_bits(got.numpy(), EDGES[f"{kind}/{rule}"])


@pytest.mark.parametrize("kind", ELEMENTS)
def test_rceil_never_clips_and_its_next_smaller_power_would(kind):
    element = ELEMENTS[kind]
    rng = np.random.default_rng(0)
    bmax = torch.from_numpy(rng.integers(0x01000000, 0x7F000000, 200_000).astype(np.int32)).view(torch.float32)
    code = choose_exponents(bmax, element, MxRule.RCEIL)
    scale = look_up("e8m0", code).double()
    inner = code > 0
    # The quotient is rounded once before its logarithm is taken: half an ulp above a power of two may stay.
    assert (bmax.double() <= element.max_value * scale * (1 + 2**-24)).all()
    assert (bmax.double() > element.max_value * scale / 2)[inner].all()


def test_nan_makes_the_scale_of_its_block_255_and_no_other():
    x = torch.from_numpy(MX["nan_block/x"])
    for kind, codec in MX_CODECS.items():
        codes, scales, _ = codec.encode(x, x, Arithmetic(), None)
        nan = x.view(4, -1, 32).isnan().any(-1)
        assert torch.equal(scales == 255, nan)
        decoded = codec.decode(codes, scales, None, x.shape[-1]).view(4, -1, 32)
        assert torch.equal(decoded.isnan().all(-1), nan), kind
        assert not decoded[~nan].isnan().any()


def test_e8m0_values():
    with np.load(GOLDEN / "tables.npz", allow_pickle=False) as tables:
        expected = tables["e8m0_values"]
    got = look_up("e8m0", torch.arange(256, dtype=torch.uint8)).numpy()
    assert np.isnan(got[255])
    assert_same_bits(got[:255], expected[:255])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_blocks_at_either_end_of_float32(name):
    # The least scale is 2^-127: a float32 subnormal, and its inverse 2^127 a normal number.
    fmt = get_format(name)
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = 2.0**-149, FLT_MIN, FLT_MAX
    stored = encode_rows(fmt, x)
    assert stored.block_scales.flatten().tolist() == [0, 0, {"mxfp4": 253, "mxfp8": 247}[name]]
    decoded = decode_rows(fmt, *stored, 32)
    assert decoded[1, 0] == FLT_MIN
    assert decoded[2, 0] == fmt.max_value * 2.0 ** {"mxfp4": 126, "mxfp8": 120}[name] or decoded[2, 0].isinf()
    assert decoded[0, 0] == 0


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_a_row_shorter_than_a_block_is_filled_up_with_zeros(name):
    fmt = get_format(name)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32))
    short, long = encode_rows(fmt, x), encode_rows(fmt, torch.nn.functional.pad(x, (0, 16)))
    assert torch.equal(short.block_scales, long.block_scales)
    assert short.codes.shape == (5, 16)
    assert torch.equal(short.codes, long.codes if name == "mxfp4" else long.codes[:, :16])
    assert torch.equal(decode_rows(fmt, *short, 16), decode_rows(fmt, *long, 32)[:, :16])
