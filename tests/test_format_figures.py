"""Figures of number formats: arrays in, curves out that hold them."""

from __future__ import annotations

import numpy as np
import pytest

from driftgate.quant import get_format
from driftgate.reports import figures


@pytest.fixture(scope="module")
def state() -> np.ndarray:
    return np.random.default_rng(3).normal(0.0, 1.0, (2, 4, 32, 64)).astype(np.float32)


def curves(axes) -> list[np.ndarray]:
    return [line.get_ydata() for line in axes.lines if len(line.get_xdata()) > 2]


def test_the_histogram_counts_every_element_that_is_not_zero(state):
    with_zeros = state.copy()
    with_zeros[0] = 0.0
    axes = figures.state_histogram({"a": state, "b": with_zeros}).axes[0]
    assert [float(y.sum()) for y in curves(axes)] == pytest.approx([100.0, 100.0], abs=0.01)
    middle = axes.lines[0].get_xdata()[np.argmax(axes.lines[0].get_ydata())]
    assert 0.3 < middle < 2.0, "a normal state has most of its elements near its root mean square"
    with pytest.raises(figures.NoDataError, match="is 0"):
        figures.state_histogram({"zero": np.zeros((1, 1, 4, 16))})


def test_signal_to_noise_is_drawn_at_the_bits_of_a_format_and_named():
    snr = {"layer 1": {"nvfp4": 20.0, "fp8": 31.0}, "layer 2": {"nvfp4": 21.0}}
    axes = figures.format_snr({"nvfp4": 4.5, "fp8": 8.5}, snr).axes[0]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [
        ([4.5, 8.5], [20.0, 31.0]), ([4.5], [21.0]),
    ]  # fmt: skip
    assert {text.get_text(): text.xy for text in axes.texts} == {"nvfp4": (4.5, 20.5), "fp8": (8.5, 31.0)}
    with pytest.raises(figures.NoDataError):
        figures.format_snr({"fp32": 32.0}, {"layer 1": {}})


def test_block_scales_are_octaves_below_the_row(state):
    falling = np.repeat(2.0 ** -np.arange(4), 16)[None, None, None, :]
    axes = figures.block_scales({"falling": falling}, block=16).axes[0]
    heights = axes.lines[0].get_ydata()
    assert sorted(heights[heights > 0]) == pytest.approx([25.0] * 4)
    places = axes.lines[0].get_xdata()[heights > 0]
    assert places == pytest.approx([0, 1, 2, 3], abs=0.08)
    with pytest.raises(ValueError, match="no whole number of blocks"):
        figures.block_scales({"odd": state[..., :60]})


def test_the_error_of_nvfp4_sits_in_the_gaps_of_e2m1_and_small_elements_become_zero(state):
    import torch

    decoded = {
        name: get_format(name).quantize(torch.from_numpy(state)).dequantize().numpy() for name in ("nvfp4", "fp8")
    }
    figure = figures.where_a_format_loses(state, decoded)
    share, zeros = curves(figure.axes[0])[0], curves(figure.axes[1])[0]
    middle = figure.axes[0].lines[0].get_xdata()
    assert share.sum() == pytest.approx(100.0)
    assert share[(middle > 4 / 6) & (middle < 1)].sum() > 2 * share[(middle > 0.5) & (middle < 4 / 6)].sum()
    assert zeros[0] > 95 and zeros[middle > 0.1].max() == 0.0
    assert curves(figure.axes[1])[1].max() < 5, "FP8 keeps small elements"
    with pytest.raises(figures.NoDataError, match="no format has an error"):
        figures.where_a_format_loses(state, {"fp32": state})
