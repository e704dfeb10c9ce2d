"""The paper's latency model (FairKV, Section 3.2), fitted to samples whose lines are known."""

import numpy as np
import pytest

from benchmarks.harness.latency_lines import LatencySample, fit_latency, fit_line


def test_lines_are_recovered() -> None:
    slope, intercept = np.random.uniform(1e-6, 1e-4), np.random.uniform(1e-5, 1e-3)
    xs = np.random.uniform(1, 500, 20)
    line = fit_line(xs.tolist(), (slope * xs + intercept).tolist())
    assert (line.slope, line.intercept) == pytest.approx((slope, intercept))
    assert line.r_squared == pytest.approx(1)
    assert line.at(7) == pytest.approx(slope * 7 + intercept)
    assert fit_line([1, 2], [3, 3]).r_squared == 1
    assert fit_line([0, 1, 2], [0, 1, 0]).r_squared == pytest.approx(0)


def test_latency_in_batch_and_budget() -> None:
    """Section 3.2: L = alpha B + beta at every budget, L = gamma C + delta at every batch."""
    per_token, start = 2e-8, 3e-5
    batches, budgets = (1, 8, 32), (128, 512, 1024)
    samples = [LatencySample(b, c, per_token * b * c + start) for b in batches for c in budgets]
    model = fit_latency(samples)
    for budget, line in model.over_batch.items():
        assert (line.slope, line.intercept) == pytest.approx((per_token * budget, start))
    for batch, line in model.over_budget.items():
        assert (line.slope, line.intercept) == pytest.approx((per_token * batch, start))
    assert list(model.over_batch) == [128, 512, 1024] and list(model.over_budget) == [1, 8, 32]
    assert model.over_tokens.slope == pytest.approx(per_token)
