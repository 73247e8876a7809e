"""Metrics on logits against closed forms and a long-double oracle, with their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from driftgate.accuracy.metrics.kl import kl_divergence
from driftgate.accuracy.metrics.probability import delta_p, negative_log_likelihood
from driftgate.accuracy.metrics.state_error import relative_error
from driftgate.accuracy.metrics.top import same_top, top_token

INF, NAN = math.inf, math.nan


def _oracle_kl(baseline: torch.Tensor, plan: torch.Tensor) -> float:
    """Textbook KL in long double (64-bit mantissa), summed exactly; good to about 1e-18 absolute."""
    x = baseline.double().numpy().astype(np.longdouble)
    y = plan.double().numpy().astype(np.longdouble)
    log_p = x - x.max() - np.log(np.exp(x - x.max()).sum())
    log_q = y - y.max() - np.log(np.exp(y - y.max()).sum())
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def _noise(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestKl:
    def test_closed_form(self):
        p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.6, 0.4]).log()
        expected = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)  # 0.02041; a sum of |.| would be 0.2027
        # the logits are FP32: an error of 2^-24·|ln p| in each moves KL by less than 1e-7
        assert kl_divergence(p, q).item() == pytest.approx(expected, abs=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_equal_logits_give_exactly_zero(self, dtype):
        logits = (_noise((5, 4001)) * 4).to(dtype)
        assert torch.equal(kl_divergence(logits, logits.clone()), torch.zeros(5, dtype=torch.float64))

    @pytest.mark.parametrize("scale", [1.0, 1e-3])
    def test_agrees_with_long_double_at_a_large_vocabulary(self, scale):
        baseline = _noise((1, 150_000))
        plan = baseline + scale * _noise((1, 150_000), seed=1)
        expected = _oracle_kl(baseline[0], plan[0])
        # FP64 sums of 150,000 terms: relative error below 150,000·2^-53 = 1.7e-11
        assert kl_divergence(baseline, plan).item() == pytest.approx(expected, rel=1.7e-11, abs=0.0)

    def test_small_divergences_keep_their_digits(self):
        """For noise of size e, KL = e²·Var_p(noise)/2 up to a relative O(e), far below an ulp of 1."""
        baseline, direction = _noise((1, 2000)), _noise((1, 2000), seed=1)
        p = torch.softmax(baseline, -1)
        variance = (p * direction**2).sum() - (p * direction).sum() ** 2
        for size in (1e-5, 1e-7, 1e-9):
            found = kl_divergence(baseline, baseline + size * direction).item()
            # baseline + size·direction itself rounds: 2^-53·4 on a direction of size·1
            rel = 10 * size + 4 * 2.0**-52 * 4 / size
            assert found == pytest.approx(0.5 * size**2 * variance.item(), rel=rel, abs=0.0), size

    def test_no_step_is_negative(self):
        baseline = (_noise((200, 500)) * 5).float()
        tiny = baseline * (1 + 2.0**-24 * torch.randint(-1, 2, baseline.shape, generator=torch.Generator()))
        assert (kl_divergence(baseline, tiny) >= 0).all()

    @pytest.mark.parametrize(
        ("baseline", "plan", "expected"),
        [
            ([0.0, 0.0, -INF], [0.0, 0.0, -INF], 0.0),
            ([0.0, 0.0], [0.0, -INF], INF),
            ([0.0, -INF], [0.0, 0.0], math.log(2)),
            ([0.0, -2000.0], [0.0, 0.0], math.log(2)),
            ([0.0, -700.0], [-700.0, 0.0], 700.0),
            ([0.0, -800.0], [-800.0, 0.0], 800.0),
            ([NAN, 0.0], [0.0, 0.0], NAN),
            ([0.0, 0.0], [0.0, NAN], NAN),
            ([0.0, INF], [0.0, 0.0], NAN),
            ([0.0, 0.0], [-INF, -INF], NAN),
        ],
    )
    def test_edges(self, baseline, plan, expected):
        found = kl_divergence(torch.tensor(baseline), torch.tensor(plan)).item()
        assert found == pytest.approx(expected, rel=1e-14, abs=1e-15, nan_ok=True)

    def test_nan_stays_in_its_own_step(self):
        baseline, plan = _noise((3, 9)), _noise((3, 9), seed=1)
        alone = kl_divergence(baseline, plan)
        plan[1, 4] = NAN
        found = kl_divergence(baseline, plan)
        assert found[1].isnan() and torch.equal(found[[0, 2]], alone[[0, 2]])

    def test_padding_of_the_vocabulary_is_cut_off(self):
        baseline, plan = _noise((2, 10)), _noise((2, 10), seed=1)
        expected = kl_divergence(baseline[:, :7], plan[:, :7])
        baseline[:, 7:], plan[:, 7:] = NAN, INF
        assert torch.equal(kl_divergence(baseline, plan, vocab_size=7), expected)

    def test_large_bfloat16_logits_are_upcast_first(self):
        """7e4 overflows FP16 and rounds to 70144 in BF16; in FP64 nothing is lost after that."""
        baseline = torch.tensor([[7e4, 69900.0, 0.0]]).bfloat16()
        plan = torch.tensor([[7e4, 70144.0, 0.0]]).bfloat16()
        expected = _oracle_kl(baseline[0].double(), plan[0].double())
        assert kl_divergence(baseline, plan).item() == pytest.approx(expected, rel=1e-12)

    def test_no_reduction_over_steps(self):
        baseline, plan = _noise((2, 3, 11)), _noise((2, 3, 11), seed=1)
        steps = [kl_divergence(baseline[i, j], plan[i, j]).item() for i in range(2) for j in range(3)]
        assert kl_divergence(baseline, plan).mean().item() == pytest.approx(sum(steps) / 6, rel=1e-14)

    def test_blocks_do_not_change_bits(self, monkeypatch):
        baseline, plan = _noise((6, 33))[None].expand(4, 6, 33), _noise((4, 6, 33), seed=1)
        whole = kl_divergence(baseline, plan)
        for elements in (1, 2 * 33, 7 * 33, 13 * 33):
            monkeypatch.setattr("driftgate.accuracy.metrics.kl.CHUNK_ELEMENTS", elements)
            assert torch.equal(kl_divergence(baseline, plan), whole), elements

    def test_empty_and_scalar_leads(self):
        assert kl_divergence(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)
        assert kl_divergence(torch.zeros(5), torch.zeros(5)).shape == ()

    @pytest.mark.parametrize(
        ("baseline", "plan", "options", "says"),
        [
            (torch.zeros(10, 5), torch.zeros(9, 5), {}, "equal shapes"),
            (torch.zeros(10, 5), torch.zeros(10, 6), {}, "equal shapes"),
            (torch.zeros(5, dtype=torch.int64), torch.zeros(5), {}, "floating"),
            (torch.zeros(2, 0), torch.zeros(2, 0), {}, "V >= 1"),
            (torch.zeros(5), torch.zeros(5), {"vocab_size": 6}, "vocab_size"),
            (torch.zeros(5), torch.zeros(5), {"vocab_size": 0}, "vocab_size"),
        ],
    )
    def test_refuses(self, baseline, plan, options, says):
        with pytest.raises(ValueError, match=says):
            kl_divergence(baseline, plan, **options)


class TestTop:
    def test_ties_go_to_the_lower_id(self):
        logits = torch.zeros(3, 50_000)
        logits[0, [7, 40_000]] = 1.0
        logits[1, [49_999, 3]] = 2.0
        assert top_token(logits).tolist() == [7, 3, 0]

    def test_same_top_counts_ties_by_that_rule(self):
        baseline, plan = torch.tensor([[1.0, 1.0, 0.0]] * 2), torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
        assert same_top(baseline, plan).tolist() == [True, False]

    def test_nan_agrees_with_nothing(self):
        row = torch.tensor([[NAN, 1.0]])
        assert not same_top(row, row).item() and top_token(row).item() == -1

    def test_padding_never_wins(self):
        logits = torch.tensor([0.0, 1.0, 9.0])
        assert top_token(logits, vocab_size=2).item() == 1

    def test_minus_infinity_everywhere_is_a_tie(self):
        assert top_token(torch.full((4,), -INF)).item() == 0

    def test_unequal_shapes_are_refused(self):
        with pytest.raises(ValueError, match="equal shapes"):
            same_top(torch.zeros(2, 3), torch.zeros(3, 3))


class TestProbability:
    def test_closed_forms(self):
        baseline, plan = torch.log(torch.tensor([[[0.5, 0.5]], [[0.6, 0.4]]], dtype=torch.float64))
        target = torch.tensor([0])
        assert negative_log_likelihood(plan, target).item() == pytest.approx(-math.log(0.6), rel=1e-14)
        assert delta_p(baseline, plan, target).item() == pytest.approx(0.1, rel=1e-14)
        assert delta_p(plan, baseline, target).item() == pytest.approx(-0.1, rel=1e-14)

    def test_equal_logits_give_exactly_zero(self):
        logits = _noise((4, 5, 300)).float()
        assert torch.equal(delta_p(logits, logits.clone(), torch.zeros(4, 5).long()), torch.zeros(4, 5).double())

    def test_small_differences_keep_their_digits(self):
        """d p_0 / d x_0 = p_0·(1 - p_0); 1e-12 on a logit moves p by 2.5e-13."""
        baseline = torch.zeros(1, 2, dtype=torch.float64)
        plan = baseline + torch.tensor([1e-12, 0.0], dtype=torch.float64)
        # log-sum-exp of each side rounds to 2^-53: 1.1e-16 of 5e-13
        assert delta_p(baseline, plan, torch.tensor([0])).item() == pytest.approx(2.5e-13, rel=5e-4, abs=0.0)

    @pytest.mark.parametrize(
        ("baseline", "plan", "expected"),
        [([0.0, -INF], [0.0, 0.0], 0.5), ([0.0, 0.0], [0.0, -INF], -0.5), ([0.0, -INF], [5.0, -INF], 0.0)],
    )
    def test_delta_p_at_probability_zero(self, baseline, plan, expected):
        assert delta_p(torch.tensor(baseline), torch.tensor(plan), torch.tensor(1)).item() == expected

    def test_likelihood_of_an_impossible_token_is_infinite(self):
        assert negative_log_likelihood(torch.tensor([0.0, -INF]), torch.tensor(1)).item() == INF

    def test_large_half_precision_logits(self):
        logits = torch.tensor([[65504.0, 65504.0]]).half()
        assert negative_log_likelihood(logits, torch.tensor([1])).item() == pytest.approx(math.log(2), abs=2e-11)

    @pytest.mark.parametrize(
        ("targets", "says"),
        [
            (torch.tensor([3]), "ids 0 … 2"),
            (torch.tensor([-1]), "ids 0 … 2"),
            (torch.tensor([0, 1]), "shape"),
            (torch.tensor([0.0]), "integer"),
        ],
    )
    def test_refuses_targets(self, targets, says):
        with pytest.raises(ValueError, match=says):
            negative_log_likelihood(torch.zeros(1, 5), targets, vocab_size=3)


class TestStateError:
    def test_per_head(self):
        reference = torch.stack([torch.full((2, 2), 2.0), torch.full((2, 2), 4.0)])
        x = reference + torch.tensor([1.0, 0.0])[:, None, None]
        assert relative_error(x, reference, (-2, -1)).tolist() == [0.5, 0.0]

    def test_zero_reference(self):
        x = torch.tensor([[0.0, 0.0], [0.0, 3.0]])
        assert relative_error(x, torch.zeros(2, 2), -1).tolist() == [0.0, INF]

    def test_nan_and_infinity_show(self):
        x = torch.tensor([[NAN, 0.0], [INF, 0.0]])
        assert relative_error(x, torch.ones(2, 2), -1).isnan().tolist() == [True, False]

    def test_squares_do_not_overflow_or_vanish(self):
        for size in (1e-30, 1e30):
            reference = torch.full((1, 4), size)
            assert relative_error(1.5 * reference, reference, -1).item() == pytest.approx(0.5, rel=1e-6)

    @pytest.mark.parametrize(
        ("x", "reference", "dims", "says"),
        [
            (torch.zeros(2), torch.zeros(3), -1, "shape of x"),
            (torch.zeros(2), torch.zeros(2), (), "at least one axis"),
            (torch.zeros(2).int(), torch.zeros(2), -1, "floating"),
        ],
    )
    def test_refuses(self, x, reference, dims, says):
        with pytest.raises(ValueError, match=says):
            relative_error(x, reference, dims)


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_metrics_of_a_step_read_nothing_back_from_the_device(lead):
    """A meta tensor has no values: reading one, which would stop a GPU at every step, raises."""
    base, plan = (torch.empty(*lead, 8, device="meta") for _ in range(2))
    targets = torch.empty(lead, dtype=torch.int64, device="meta")
    for found in (
        negative_log_likelihood(base, targets), delta_p(base, plan, targets), kl_divergence(base, plan),
        same_top(base, plan),
    ):  # fmt: skip
        assert (found.device.type, found.shape) == ("meta", torch.Size(lead))
