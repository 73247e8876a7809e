"""Tile functions under Triton's interpreter: every bit against published vectors, NumPy and the codecs.

One process with TRITON_INTERPRET=1 (tests/quant_device_cases.py) stores and reads all cases. Names of cases
say the format and what they are for; each runs with the E4M3 instruction and, where a format uses E4M3, with
its integer twin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from driftgate.quant import Noise, decode_rows, encode_rows, get_format

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "quant"
GUARD, POISON = 256, 0xAA
FLT_MAX = np.finfo(np.float32).max
SCALED = ("fp8", "nvfp4", "fp8_e5m2", "int8", "int16", "mxfp4", "mxfp8")
WITH_CVT = ("fp8", "nvfp4", "fp8_e5m2", "mxfp8")
NARROW = {"fp8": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8, "int16": np.int16}
TOPS = {"fp8": 448, "fp8_e5m2": 57344, "int8": 127, "int16": 32767, "nvfp4": 2688}
PLAIN = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
SHAPES = {
    "16x16": (16, 16, 16),
    "5x17": (5, 17, 8),
    "24x24": (24, 24, 16),
    "16x40": (16, 40, 16),
    "9x80": (9, 80, 4),
}
STOCHASTIC = ("bf16", "fp16", "int16", "fp8", "fp8_e5m2", "int8", "nvfp4")
NOISES = {
    "plain": {"seed": 1234567890123456789, "first_element": 0, "tokens": 0, "streams": 0},
    "far": {"seed": -7, "first_element": 2**33 - 900, "tokens": 2**32 - 1, "streams": 0xDEADBEEF},
}
KINDS = ("normal", "wide", "halves", "extreme")
GOLDEN_NAMES = {"fp8": "e4m3", "fp8_e5m2": "e5m2", "int8": "int8", "int16": "int16"}
MX_CASES = ("wide_range", "pad_n40", "near_fltmax", "zeros_mixed", "exact_ties")
ROW_CASES = (
    "student_t2",
    "small_ints",
    "block_outlier",
    "subnormal_f32",
    "tiny_normal",
    "zeros_mixed",
    "near_fltmax",
)


def draw(kind: str, d_v: int, d_k: int) -> np.ndarray:
    """State-like numbers: ``halves`` lie on ties of every format, ``extreme`` covers the range of float32."""
    rng = np.random.default_rng([KINDS.index(kind), d_v, d_k])
    x = rng.standard_normal((d_v, d_k))
    if kind == "wide":
        x *= 2.0 ** rng.integers(-30, 1, (d_v, d_k))
    if kind == "halves":
        x = rng.integers(-48, 49, (d_v, d_k)) / 8
        x[:, 0] = 6.0
    if kind == "extreme":
        x = rng.standard_normal((d_v, d_k)) * 2.0 ** rng.integers(-149, 126, (d_v, 1))
        x[0, 1], x[1] = FLT_MAX, np.where(np.arange(d_k) % 2, -0.0, 0.0)
    return x.astype(np.float32)


def with_nonfinite(d_v: int = 8, d_k: int = 40) -> np.ndarray:
    x = draw("normal", d_v, d_k)
    x[1, 3], x[1, 20] = np.nan, -np.inf
    x[2] = np.nan
    x[4, 39] = np.inf
    x[5, 0] = np.uint32(0xFFC00001).view(np.float32)
    return x


@cache
def golden(file: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / f"{file}.npz"))


@cache
def make_cases() -> tuple[list[dict[str, object]], dict[str, np.ndarray]]:
    """Cases and their states, as the program wants them."""
    data = {}
    for name in ("fp32", "bf16", "fp16", *SCALED):
        for shape, (d_v, d_k, _) in SHAPES.items():
            data[name, f"random/{shape}"] = np.concatenate([draw(kind, d_v, d_k) for kind in KINDS])
        data[name, "nonfinite"] = with_nonfinite()
    data["fp16", "overflow"] = np.array([[1.0, 65519.0], [65520.0, 1.0]], np.float32)
    data["nvfp4", "golden/row_scope"] = golden("nvfp4")["row_scope/x"]
    for name in SCALED:
        data[name, "golden/state"] = golden("state_scaled")["x"].reshape(-1, 64)
    for case, name in product(ROW_CASES, GOLDEN_NAMES):
        data[name, f"golden/rows/{case}"] = golden("scaled_rows")[f"{case}/x"]
    for case, name in product(MX_CASES, ("mxfp4", "mxfp8")):
        data[name, f"golden/mx/{case}"] = golden("mx")[f"{case}/x"]
    for name in ("mxfp4", "mxfp8"):
        amax = golden("mx_scale_edges")["amax"]
        data[name, "golden/edges"] = np.pad(amax[:, None], ((0, 0), (3, 12)))
    cases, arrays = [], {}
    for (name, what), x in data.items():
        block_v = SHAPES[what.split("/")[1]][2] if what.startswith("random") else 16
        for cvt in (True, False) if name in WITH_CVT else (True,):
            key = f"{name}/{what}/{'cvt' if cvt else 'integers'}"
            cases.append({"name": key, "format": name, "block_v": block_v, "cvt": cvt})
            arrays[f"{key}/x"] = x
    for name, (what, noise) in product(STOCHASTIC, NOISES.items()):
        key = f"{name}/stochastic/{what}"
        cases.append({"name": key, "format": name, "block_v": 8, "cvt": True, "noise": noise})
        x = np.concatenate([draw("normal", 16, 40), draw("wide", 16, 40), draw("extreme", 16, 40), with_nonfinite()])
        x[3, :8] = np.array([65504, 65510, 65519, 65520, 65535, 65536, -65519, 3e-6], np.float32)
        x[4] *= np.float32(1e-6)
        x[5, :4] = np.array([-1e-44, -1e-38, 1e-44, -3e-9], np.float32)  # little below zero
        arrays[f"{key}/x"] = x
    return cases, arrays


CASES = {str(case["name"]): case for case in make_cases()[0]}


def noise_of(name: str) -> Noise | None:
    """Where the random bits of a case come from."""
    noise = CASES[name].get("noise")
    return None if noise is None else Noise(**noise)


def run_cases(folder: Path, *, interpret: bool) -> dict[str, np.ndarray]:
    """What every case left in memory."""
    cases, arrays = make_cases()
    np.savez(folder / "inputs.npz", cases=np.array(json.dumps(cases)), **arrays)
    command = [
        sys.executable,
        "-P",
        HERE / "quant_device_cases.py",
        folder / "inputs.npz",
        folder / "outputs.npz",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "outputs.npz"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run_cases(tmp_path_factory.mktemp("device"), interpret=True)


def stored(outputs: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """What a case wrote, without its guards: codes as bytes [d_v, ...], block scales, row scales."""
    d_v = len(make_cases()[1][f"{name}/x"])
    kinds = {"codes": np.uint8, "block_scales": np.uint8, "row_scales": np.float32}
    inner = {k: outputs[f"{name}/{k}"][GUARD:-GUARD] for k in kinds if f"{name}/{k}" in outputs}
    return {k: bytes_.view(kinds[k]).reshape(d_v, -1) for k, bytes_ in inner.items()}


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Bits of float32 arrays; NaN by class."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def e2m1_pairs(x: np.ndarray) -> np.ndarray:
    """Packed codes of values rounded to E2M1, last axis even."""
    codes = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def quantize_with_numpy(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """The rules of the formats once more, with NumPy and ml_dtypes alone; x finite [d_v, d_k]."""
    one = np.float32(1)
    if name not in SCALED:
        return {"codes": x.astype(PLAIN[name]).view(np.uint8).reshape(len(x), -1)}
    if name.startswith("mx"):
        return quantize_mx_with_numpy(name, x)
    amax = np.abs(x).max(axis=1, keepdims=True)
    top = np.float32(TOPS[name])
    e = np.where(amax == 0, one, np.minimum(top / amax, FLT_MAX))
    if name in NARROW:
        scaled = np.clip(x * e, -top, top)
        codes = (np.rint(scaled) if name.startswith("int") else scaled).astype(NARROW[name])
        return {"codes": codes.view(np.uint8), "row_scales": one / e}
    pad = -x.shape[1] % 16
    blocks = np.pad(x, ((0, 0), (0, pad))).reshape(len(x), -1, 16)
    s8 = np.clip(np.abs(blocks).max(axis=2) * (e * np.float32(1 / 6)), 0, 448).astype(ml_dtypes.float8_e4m3fn)
    d = s8.astype(np.float32) * (one / e)
    codes = e2m1_pairs(blocks * np.minimum(one / d, FLT_MAX)[:, :, None])
    return {"codes": codes.reshape(len(x), -1), "block_scales": s8.view(np.uint8), "row_scales": one / e}


def quantize_mx_with_numpy(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Exponents by frexp: v = f * 2^n with f in [.5, 1), so ceil(log2 v) is n, or n - 1 where f is .5."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    fraction, n = np.frexp(np.abs(blocks).max(axis=2) / np.float32(6 if name == "mxfp4" else 448))
    u = np.where(fraction == 0, -127, np.clip(n - (fraction == 0.5), -127, 127))
    scaled = np.ldexp(blocks, -u[:, :, None]).astype(np.float32).reshape(len(x), -1)
    if name == "mxfp4":
        codes = e2m1_pairs(scaled)
    else:
        codes = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)[:, : x.shape[1]]
    return {"codes": np.ascontiguousarray(codes), "block_scales": (u + 127).astype(np.uint8)}


RANDOM = [name for name in CASES if "/random/" in name]


@pytest.mark.parametrize("name", RANDOM)
def test_codes_equal_numpy(outputs: dict[str, np.ndarray], name: str) -> None:
    with np.errstate(all="ignore"):
        expected = quantize_with_numpy(str(CASES[name]["format"]), make_cases()[1][f"{name}/x"])
    found = stored(outputs, name)
    assert found.keys() == expected.keys()
    for part, array in expected.items():
        np.testing.assert_array_equal(found[part].view(np.uint8), array.view(np.uint8), err_msg=part)


@pytest.mark.parametrize("name", CASES)
def test_codes_equal_the_codecs(outputs: dict[str, np.ndarray], name: str) -> None:
    x, kind = torch.from_numpy(make_cases()[1][f"{name}/x"]), str(CASES[name]["format"])
    encoded = encode_rows(get_format(kind), x, nonfinite="saturate", noise=noise_of(name))
    for part, array in stored(outputs, name).items():
        expected = getattr(encoded, part).contiguous().view(torch.uint8).numpy().reshape(len(x), -1)
        if kind in PLAIN:  # which NaN a cast gives is left open
            assert_same_bits(*(codes.view(PLAIN[kind]).astype(np.float32) for codes in (array, expected)))
        else:
            np.testing.assert_array_equal(array.view(np.uint8), expected, err_msg=part)


@pytest.mark.parametrize("name", CASES)
def test_tile_reads_as_the_codecs_decode(outputs: dict[str, np.ndarray], name: str) -> None:
    fmt, x = get_format(str(CASES[name]["format"])), make_cases()[1][f"{name}/x"]
    encoded = encode_rows(fmt, torch.from_numpy(x), nonfinite="saturate", noise=noise_of(name))
    expected = np.zeros_like(outputs[f"{name}/y"])
    expected[: len(x), : x.shape[1]] = decode_rows(fmt, *encoded, x.shape[1]).numpy()
    assert_same_bits(outputs[f"{name}/y"], expected)


@pytest.mark.parametrize("name", CASES)
def test_round_trip_equals_store_and_load(outputs: dict[str, np.ndarray], name: str) -> None:
    assert_same_bits(outputs[f"{name}/back"], outputs[f"{name}/y"])


@pytest.mark.parametrize("name", CASES)
def test_nothing_outside_the_head_is_written(outputs: dict[str, np.ndarray], name: str) -> None:
    for part in stored(outputs, name):
        memory = outputs[f"{name}/{part}"]
        assert np.all(memory[:GUARD] == POISON), part
        assert np.all(memory[-GUARD:] == POISON), part


@pytest.mark.parametrize("cvt", ["cvt", "integers"])
@pytest.mark.parametrize("what", ["row_scope", "state"])
def test_published_nvfp4_rows(outputs: dict[str, np.ndarray], what: str, cvt: str) -> None:
    file, prefix = {"row_scope": ("nvfp4", "row_scope/te"), "state": ("state_scaled", "nvfp4/row/dk")}[what]
    found = stored(outputs, f"nvfp4/golden/{what}/{cvt}")
    expected = golden(file)
    np.testing.assert_array_equal(found["codes"].ravel(), expected[f"{prefix}/packed"].ravel())
    np.testing.assert_array_equal(found["block_scales"].ravel(), expected[f"{prefix}/s8"].ravel())
    assert_same_bits(found["row_scales"].ravel(), expected[f"{prefix}/s2"].ravel())
    deq = expected[f"{prefix}/deq"]
    y = outputs[f"nvfp4/golden/{what}/{cvt}/y"][: deq.size // deq.shape[-1], : deq.shape[-1]]
    assert_same_bits(np.ascontiguousarray(y).ravel(), deq.ravel())


@pytest.mark.parametrize("name", [name for name in CASES if "/golden/" in name and name.split("/")[0] in GOLDEN_NAMES])
def test_published_scaled_rows(outputs: dict[str, np.ndarray], name: str) -> None:
    kind, what = name.split("/")[0], name.split("/", 2)[2].rsplit("/", 1)[0]
    case = what.removeprefix("rows/")
    file = "state_scaled" if what == "state" else "scaled_rows"
    prefix = f"{GOLDEN_NAMES[kind]}/row" if what == "state" else f"{case}/{GOLDEN_NAMES[kind]}"
    found = stored(outputs, name)
    codes = golden(file)[f"{prefix}/encode/codes"]
    np.testing.assert_array_equal(found["codes"].ravel(), np.ascontiguousarray(codes).view(np.uint8).ravel())
    assert_same_bits(found["row_scales"].ravel(), golden(file)[f"{prefix}/encode/scale"].ravel())
    if what == "state":
        assert_same_bits(outputs[f"{name}/y"].ravel(), golden(file)[f"{prefix}/encode/deq"].ravel())


@pytest.mark.parametrize("name", [name for name in CASES if "/golden/mx/" in name])
def test_published_mx_blocks(outputs: dict[str, np.ndarray], name: str) -> None:
    kind, case = name.split("/")[0], name.split("/")[3]
    prefix = f"{case}/{'e2m1' if kind == 'mxfp4' else 'e4m3'}/rceil"
    found = stored(outputs, name)
    expected = golden("mx")[f"{prefix}/{'packed' if kind == 'mxfp4' else 'codes'}"]
    np.testing.assert_array_equal(found["codes"], expected)
    np.testing.assert_array_equal(found["block_scales"], golden("mx")[f"{prefix}/scale"])


@pytest.mark.parametrize("name", [name for name in CASES if "/golden/edges/" in name])
def test_published_mx_exponents(outputs: dict[str, np.ndarray], name: str) -> None:
    expected = golden("mx_scale_edges")["e2m1/rceil" if name.startswith("mxfp4") else "e4m3/rceil"]
    np.testing.assert_array_equal(stored(outputs, name)["block_scales"][:, 0], expected)


@pytest.mark.parametrize("name", CASES)
def test_error_is_raised_by_nonfinite_elements_alone(outputs: dict[str, np.ndarray], name: str) -> None:
    # Tiles outside the head are NaN in every case: they must not count.
    case, x = CASES[name], make_cases()[1][f"{name}/x"]
    step = int(str(case["block_v"]))
    with np.errstate(all="ignore"):
        kept = x.astype(PLAIN.get(str(case["format"]), np.float32)).astype(np.float32)
    if case.get("noise") and case["format"] in PLAIN:  # at random, what lies below the threshold may overflow
        kept = outputs[f"{name}/y"][: len(x), : x.shape[1]]
    bad = ~np.isfinite(kept).all(axis=1)
    expected = [int(bad[i : i + step].any()) for i in range(0, len(x), step)]
    np.testing.assert_array_equal(outputs[f"{name}/error"], expected)


@pytest.mark.parametrize("cvt", ["cvt", "integers"])
def test_nonfinite_elements_saturate_their_own_code(outputs: dict[str, np.ndarray], cvt: str) -> None:
    nvfp4 = stored(outputs, f"nvfp4/nonfinite/{cvt}")["codes"]
    nibbles = np.stack([nvfp4 & 15, nvfp4 >> 4], axis=-1).reshape(len(nvfp4), -1)
    fp8 = stored(outputs, f"fp8/nonfinite/{cvt}")["codes"]
    places = {
        (1, 3): (0x7, 0x7F),
        (1, 20): (0xF, 0xFE),
        (2, 0): (0x7, 0x7F),
        (4, 39): (0x7, 0x7E),
        (5, 0): (0x7, 0x7F),
    }
    for place, codes in places.items():
        assert (nibbles[place], fp8[place]) == codes, place


@pytest.mark.parametrize("case", [name for name in CASES if "/nonfinite/" in name and name.split("/")[0] in SCALED])
def test_nonfinite_elements_do_not_move_the_others(outputs: dict[str, np.ndarray], case: str) -> None:
    name = case.split("/")[0]
    x = with_nonfinite()
    finite = np.isfinite(x)
    encoded = encode_rows(get_format(name), torch.from_numpy(np.where(finite, x, np.float32(0))))
    expected = decode_rows(get_format(name), *encoded, x.shape[1]).numpy()
    y = outputs[f"{case}/y"][: len(x), : x.shape[1]]
    np.testing.assert_array_equal(y[finite], expected[finite])


@pytest.mark.parametrize("name", ["nvfp4/random/24x24/cvt", "nvfp4/random/24x24/integers"])
def test_row_of_zeros(outputs: dict[str, np.ndarray], name: str) -> None:
    row = KINDS.index("extreme") * 24 + 1
    found = stored(outputs, name)
    np.testing.assert_array_equal(found["codes"][row], [0x80] * 12 + [0] * 4)
    np.testing.assert_array_equal(found["block_scales"][row], 0)
    assert found["row_scales"][row] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_functions_store_and_read_the_same(outputs: dict[str, np.ndarray], tmp_path: Path) -> None:
    compiled = run_cases(tmp_path, interpret=False)
    assert compiled.keys() == outputs.keys()
    for name, array in compiled.items():
        if array.dtype == np.float32:
            assert_same_bits(array, outputs[name])
        elif name.endswith("/codes") and (kind := name.split("/")[0]) in PLAIN:  # which NaN a cast gives is left open
            assert_same_bits(*(codes.view(PLAIN[kind]).astype(np.float32) for codes in (array, outputs[name])))
        else:
            np.testing.assert_array_equal(array, outputs[name], err_msg=name)


def test_random_bits_depend_on_what_is_rounded_and_not_on_the_tile(outputs: dict[str, np.ndarray]) -> None:
    # Both noises on the same values: other codes, as many as a coin gives for what lies between two codes.
    first, second = (stored(outputs, f"int8/stochastic/{what}")["codes"][:16].view(np.int8) for what in NOISES)
    assert 0.1 < np.mean(first != second) < 0.6
    assert np.abs(first.astype(int) - second).max() == 1


def test_format_ids_are_the_catalogue_s() -> None:
    program = (
        "from driftgate.quant.device import FORMAT_IDS as ids\n"
        "from driftgate.quant import FORMATS\n"
        "import json; print(json.dumps([[name, int(ids[name])] for name in FORMATS]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    ids = dict(json.loads(done.stdout))
    assert sorted(ids, key=ids.get) == [
        "fp32", "bf16", "fp16", "fp8", "nvfp4", "fp8_e5m2", "int8", "int16", "mxfp4", "mxfp8",
    ]  # fmt: skip
    assert sorted(ids.values()) == list(range(10))


def test_quant_imports_no_triton() -> None:
    program = "import sys, driftgate.quant as q; q.encode_rows; print('triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
