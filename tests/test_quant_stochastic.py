"""Stochastic rounding: Philox, every stored vector, exact counts over all random bits, and what a stream depends on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from driftgate.quant import FORMATS, Arithmetic, Noise, decode_rows, encode_rows, get_format, hash_stream
from driftgate.quant.elements import BF16, E2M1, E4M3, E5M2, FP16, round_integer
from driftgate.quant.oracle import ELEMENTS as ORACLE
from driftgate.quant.philox import philox4x32, spread_word

with np.load(Path(__file__).parent / "golden" / "quant" / "stochastic.npz", allow_pickle=False) as _arrays:
    GOLDEN = {key: _arrays[key] for key in _arrays.files}

STOCHASTIC = [name for name, fmt in FORMATS.items() if fmt.stochastic]
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "f16": FP16, "bf16": BF16}
BITS = {"e4m3": 16, "e5m2": 16, "e2m1": 8, "f16": 13, "bf16": 16}
ORACLE_NAMES = {"e4m3": "fp8", "e5m2": "fp8_e5m2", "e2m1": "nvfp4", "f16": "fp16", "bf16": "bf16"}
# Values between two codes of each type, in all its ranges: normal, subnormal, next to its greatest.
PLACES = {
    "e4m3": (1.03, -17.7, 0.0157, 0.0021, -0.0009, 447.9, 300.1),
    "e5m2": (1.1, -4000.3, 7e-5, 2e-5, -9e-6, 57000.0),
    "e2m1": (0.13, -0.4, 1.3, 2.7, -5.2, 5.99),
    "f16": (1.0003, -333.37, 6.2e-5, 3e-6, -4.1e-7, 2e-8, 65500.0),
    "bf16": (1.001, -3.3e20, 1e-37, -2e-39, 4e-41),
}


def words(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, n))


def assert_codes(got, expected):
    got = got.numpy() if got.dtype in (torch.uint8, torch.int8) else got.view(torch.uint16).numpy()
    np.testing.assert_array_equal(got, expected)


def test_philox_known_answers():
    index = torch.from_numpy(GOLDEN["philox/offset"])
    zero = torch.zeros_like(index)
    for seed, expected in zip(GOLDEN["philox/seed"].tolist(), GOLDEN["philox/out"], strict=True):
        got = philox4x32(seed, (index & 0xFFFFFFFF, index >> 32 & 0xFFFFFFFF, zero, zero))
        np.testing.assert_array_equal(torch.stack(got, dim=-1).numpy(), expected)


@pytest.mark.parametrize("kind", ELEMENTS)
def test_stored_codes(kind):
    x, bits = torch.from_numpy(GOLDEN[f"{kind}/x"]), torch.from_numpy(GOLDEN[f"{kind}/rbits"].astype(np.int64))
    assert_codes(ELEMENTS[kind].encode(x, bits, random_bits=BITS[kind]), GOLDEN[f"{kind}/code"])


def test_stored_integers():
    x, bits = torch.from_numpy(GOLDEN["int8_24bit/x"]), torch.from_numpy(GOLDEN["int8_24bit/rbits"].astype(np.int64))
    assert_codes(round_integer(x, 127, bits).to(torch.int8), GOLDEN["int8_24bit/code"])


def test_stored_codes_of_four_values_that_share_a_word():
    bits = spread_word(torch.from_numpy(GOLDEN["e4m3_x4/rbits"].astype(np.int64)))
    assert_codes(E4M3.encode(torch.from_numpy(GOLDEN["e4m3_x4/x"]), bits), GOLDEN["e4m3_x4/code"])
    bits = spread_word(torch.from_numpy(GOLDEN["int8_x4/rbits"].astype(np.int64)))
    # 16 bits at the top of the 24
    assert_codes(
        round_integer(torch.from_numpy(GOLDEN["int8_x4/x"]), 127, bits << 8).to(torch.int8), GOLDEN["int8_x4/code"]
    )


@pytest.mark.parametrize("kind", ELEMENTS)
def test_codes_are_the_oracle_s_over_all_exponents(kind):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 0x7F800000, 3000).astype(np.uint32).view(np.float32) * rng.choice([-1, 1], 3000)
    near = rng.standard_normal(3000) * 2.0 ** rng.uniform(-30, 17, 3000)
    x = torch.from_numpy(np.concatenate([x, near]).astype(np.float32))
    element, drawn = ELEMENTS[kind], words(6000)
    n = element.random_bits
    got = element.encode(x, drawn)
    got = got if got.dtype == torch.uint8 else got.view(torch.uint16)
    oracle = ORACLE[ORACLE_NAMES[kind]]
    expected = [oracle.stochastic(v, int(w) % 2**n, n) for v, w in zip(x.tolist(), drawn.tolist(), strict=True)]
    np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in PLACES.items() for value in values])
def test_probability_of_either_neighbour_is_exact(kind, value):
    # All 2^n random bits once: how often the code away from zero comes out is floor(frac * 2^n), a count.
    element, oracle = ELEMENTS[kind], ORACLE[ORACLE_NAMES[kind]]
    n = element.random_bits
    x = torch.full((2**n,), value)
    values = element.round_stochastic(x, torch.arange(2**n), n).double()
    a = abs(float(x[0]))
    low, high = values.abs().min().item(), values.abs().max().item()
    codes = sorted({oracle.nearest(low), oracle.nearest(high)})
    assert codes[1] == codes[0] + 1
    frac = (a - low) / (high - low)
    assert int((values.abs() == high).sum()) == int(frac * 2**n)
    # so the mean is short of the value by less than 2^-n of a quantum, and never beyond it
    assert 0 <= a - values.abs().mean().item() < (high - low) * 2.0**-n


@pytest.mark.parametrize("value", [1.0003, 3.14159, -333.37, 65500.0])
def test_mean_of_normal_float16_is_the_value(value):
    x = torch.full((2**13,), value)
    assert FP16.round_stochastic(x, torch.arange(2**13), 13).double().mean().item() == x[0].item()


def test_mean_of_bfloat16_is_the_value():
    x = torch.full((2**16,), 1.0009765625001)
    assert BF16.round_stochastic(x, torch.arange(2**16), 16).double().mean().item() == x[0].item()


@pytest.mark.parametrize(
    ("top", "value", "bias"), [(127, 40.8259, 2.0**-18), (127, -3.3, 2.0**-18), (32767, 32000.4, 2.0**-10)]
)
def test_mean_of_integers_is_the_value(top, value, bias):
    # Every 2^10-th of the 2^24 random numbers, from its middle on: the mean of all to 2^-14.
    drawn = torch.arange(2**14) * 2**10 + 2**9
    mean = round_integer(torch.full((2**14,), value), top, drawn).double().mean().item()
    assert mean == pytest.approx(float(np.float32(value)), abs=2.0**-14 + bias)


def test_values_that_are_codes_stay():
    every = torch.arange(256, dtype=torch.uint8)
    for name, element in (("fp8", E4M3), ("fp8_e5m2", E5M2)):
        x = decode_rows(get_format(name), every[None], None, torch.ones(1), 256)[0]
        finite = x.isfinite()
        assert torch.equal(element.encode(x[finite], words(int(finite.sum()))), every[finite])


def test_what_overflows_at_random():
    bits = torch.tensor([0, 2**13 - 1])
    assert FP16.encode(torch.tensor([65510.0, 65510.0]), bits).tolist() == [65504.0, torch.inf]
    assert E4M3.encode(torch.tensor([460.0, 1e30]), bits).tolist() == [0x7E, 0x7E]
    assert E5M2.encode(torch.tensor([60000.0, -1e30]), bits).tolist() == [0x7B, 0xFB]


def state(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_scales_stay_nearest_and_codes_move_by_one_step_at_most(name):
    fmt, x = get_format(name), state(2, 3, 8, 40)
    nearest, drawn = encode_rows(fmt, x), encode_rows(fmt, x, noise=Noise(seed=1))
    for a, b in zip(nearest[1:], drawn[1:], strict=True):
        assert a is b or torch.equal(a, b)
    values = [decode_rows(fmt, *stored, 40) for stored in (nearest, drawn)]
    different = values[0] != values[1]
    assert 0.1 < different.float().mean() < 0.9
    # nearest is at most half a gap off, so the other neighbour is at least as far and lies on the other side
    sides = (values[0] - x) * (values[1] - x)
    assert (sides[different] <= 0).all()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_quantize_rounds_as_rows_do(name):
    fmt, x = get_format(name), state(2, 3, 8, 40)
    whole = fmt.quantize(x, rounding="stochastic", seed=5)
    rows = encode_rows(fmt, x, noise=Noise(seed=5, streams=hash_stream(torch.arange(2), 0)))
    assert torch.equal(whole.codes.view(torch.uint8), rows.codes.view(torch.uint8))
    assert torch.equal(whole.dequantize(), decode_rows(fmt, *rows, 40))
    again = fmt.quantize(x, rounding="stochastic", seed=5)
    other = fmt.quantize(x, rounding="stochastic", seed=6)
    assert torch.equal(whole.codes, again.codes)
    assert not torch.equal(whole.codes, other.codes)


@pytest.mark.parametrize("scope", ["row", "head"])
def test_an_element_keeps_its_bits_whichever_axis_has_the_blocks(scope):
    # The bits of bf16 do not depend on scales: rounded along either axis it is the same tensor.
    x = state(2, 3, 8, 40)
    along = [get_format("bf16").quantize(x, dim=dim, scope=scope, rounding="stochastic", seed=3) for dim in (-1, -2)]
    assert torch.equal(along[0].dequantize(), along[1].dequantize())


def test_a_row_of_pieces_keeps_its_bits():
    x = state(2, 3, 8, 40)
    x[..., 0], x[..., 32] = 448.0, 448.0  # one scale in either scope
    row, piece = (get_format("fp8").quantize(x, scope=s, rounding="stochastic", seed=3) for s in ("row", "1x32"))
    assert torch.equal(row.codes, piece.codes)


def test_e2m1_with_8_bits_as_the_hardware_takes_them():
    x = state(1, 1, 16, 64)
    fmt = get_format("nvfp4")
    few = fmt.quantize(x, rounding="stochastic", seed=1, arithmetic=Arithmetic(e2m1_random_bits=8))
    many = fmt.quantize(x, rounding="stochastic", seed=1)
    assert torch.equal(few.scales, many.scales)
    assert not torch.equal(few.codes, many.codes)


# From here on: what the random bits depend on.
SHAPE = torch.Size((2, 3, 4, 16))


def draw(shape=SHAPE, **noise):
    return Noise(**{"seed": 1} | noise).words(shape, torch.device("cpu"))


def test_the_bits_of_a_row_do_not_depend_on_batch_or_place():
    tokens, streams = torch.tensor([7, 9]), hash_stream(torch.tensor([100, 200]), 3)
    both = draw(tokens=tokens, streams=streams)
    swapped = draw(tokens=tokens.flip(0), streams=streams.flip(0))
    assert torch.equal(both, swapped.flip(0))
    alone = draw(torch.Size((1, 3, 4, 16)), tokens=9, streams=int(streams[1]))
    assert torch.equal(both[1:], alone)


def test_the_bits_of_a_head_are_those_of_its_place_in_the_layer():
    whole = draw(torch.Size((1, 3, 4, 16)))
    assert torch.equal(whole[:, 2:], draw(torch.Size((1, 1, 4, 16)), first_element=2 * 4 * 16))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"tokens": 1},
        {"streams": 1},
        {"first_element": 1},
        {"first_element": 2**32},
        {"first_element": 2**32 + 1},
    ],
)
def test_every_part_of_the_counter_counts(change):
    # Of 384 words of 32 bits none is expected to agree; one may.
    assert (draw() == draw(**change)).sum() <= 1


def test_neighbours_across_2_to_the_32_are_counted_on():
    across = draw(torch.Size((1, 1, 1, 16)), first_element=2**32 - 8).flatten()
    assert torch.equal(across[8:], draw(torch.Size((1, 1, 1, 8)), first_element=2**32).flatten())
    assert len(across.unique()) == 16


def test_only_32_bits_of_the_tokens_count():
    assert torch.equal(draw(tokens=5), draw(tokens=5 + 2**32))


def test_streams_of_sequences_and_layers_differ():
    sequences = torch.tensor([0, 1, 2**32, -1, 2**40])
    streams = hash_stream(sequences[:, None], torch.arange(48))
    assert streams.shape == (5, 48)
    assert len(streams.unique()) == 240
    assert int(streams.min()) >= 0
    assert int(streams.max()) < 2**32


def test_words_are_uniform_enough():
    # 2^16 words: each of the 32 bits is set in half of them, +-5 standard deviations of 128.
    drawn = draw(torch.Size((1, 1, 256, 256))).flatten()
    ones = torch.stack([(drawn >> bit & 1).sum() for bit in range(32)])
    assert ((ones - 2**15).abs() < 5 * 128).all()


@pytest.mark.parametrize("name", ["tokens", "streams"])
def test_values_for_another_number_of_sequences_are_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}: expected an int or \[2\], got 3 values"):
        draw(**{name: torch.zeros(3, dtype=torch.int64)})


def test_noise_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"^first_element: expected 0 to 2\^63 - 1, got -1"):
        Noise(seed=1, first_element=-1)
    with pytest.raises(ValueError, match=r"^x: expected up to \[n, heads, d_v, d_k\] for stochastic rounding"):
        encode_rows(get_format("fp8"), torch.ones(1, 1, 1, 1, 16), noise=Noise(seed=1))


@pytest.mark.parametrize("name", ["fp32", "mxfp4", "mxfp8"])
def test_formats_that_are_rounded_to_nearest_alone_refuse_noise(name):
    with pytest.raises(ValueError, match=f"^noise: expected None for {name}, which is rounded to nearest alone"):
        encode_rows(get_format(name), torch.ones(1, 16), noise=Noise(seed=1))


def test_small_states_keep_their_mean_in_float16():
    # 3e-6 lies among the float16 subnormals, 50.33 of them; 2^13 random bits give 50 and 51 as often as they should.
    x = torch.full((2**13,), 3e-6)
    mean = FP16.round_stochastic(x, torch.arange(2**13), 13).double().mean().item()
    assert mean == pytest.approx(float(np.float32(3e-6)), abs=2.0**-24 * 2**-13)
