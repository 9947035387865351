"""benchmark/stats.py: every figure against enumeration or by hand."""

import importlib
from itertools import combinations, product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

stats = importlib.import_module("benchmark.stats")
RESULTS = st.lists(st.integers(-3, 3), min_size=1, max_size=5)  # few different numbers: with ties


@settings(max_examples=40, deadline=None)
@given(RESULTS, st.booleans())
def test_expected_maximum_is_that_of_all_draws(results, replacement):
    """Mean and variance of the maximum over every ordered draw with, every subset without
    replacement.
    """
    mean, variance = stats.expected_maximum(np.array(results), replacement)
    assert mean.shape == variance.shape == (len(results),)
    for n in range(1, len(results) + 1):
        draws = product(results, repeat=n) if replacement else combinations(results, n)
        best = [max(draw) for draw in draws]
        assert mean[n - 1] == pytest.approx(np.mean(best), abs=1e-9)
        assert variance[n - 1] == pytest.approx(np.var(best), abs=1e-9)


def test_expected_maximum_at_its_ends():
    """One draw has the mean; all N of N the maximum, but not with replacement; large searches do
    not overflow.
    """
    without, spread = stats.expected_maximum([0.1, 0.9, 0.5])
    assert without == pytest.approx([0.5, 2.1 / 3 + 0.2 / 3, 0.9])
    assert spread[-1] == pytest.approx(0)
    assert stats.expected_maximum([0.1, 0.9, 0.5], replacement=True)[0][-1] < 0.9
    assert stats.expected_maximum(np.arange(1500))[0][[0, -1]] == pytest.approx([749.5, 1499])
    for results in ([], [0.1, np.nan], [[0.1, 0.2]]):
        with pytest.raises(ValueError, match="results of a search"):
            stats.expected_maximum(results)


def test_interquartile_mean_is_of_the_middle_half():
    """Over seeds and tasks together; a seed gone wrong does not move it; a single seed has no
    limits.
    """
    scores = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [100.0]])
    value, low, high = stats.interquartile_mean(scores)
    assert value == 3.5
    assert low < 3.5 < high < 100
    assert stats.interquartile_mean(scores.reshape(4, 2))[0] == 3.5
    uneven = [[0.0], [0.0], [0.0], [0.0], [4.0], [5.0], [6.0], [7.0]]
    assert stats.interquartile_mean(uneven)[0] == 2.25  # of 0, 0, 4 and 5
    value, *limits = stats.interquartile_mean([[0.2, 0.6]])
    assert value == pytest.approx(0.4)
    assert np.isnan(limits).all()
    with pytest.raises(ValueError, match="without NaN"):
        stats.interquartile_mean([[0.1], [np.nan]])


def average(scores):
    """The mean of [..., seeds, tasks] over both."""
    return scores.mean(axis=(-2, -1))


def test_intervals_are_those_of_all_resamples():
    """Four seeds have 256 resamples: the percentiles of their means, by enumeration; twice the
    same.
    """
    seeds = np.array([[0.0], [0.5], [0.6], [0.9]])
    every = [np.mean(draw) for draw in product(seeds[:, 0], repeat=4)]
    low, high = np.percentile(every, [2.5, 97.5], method="inverted_cdf")
    estimates = [stats.bootstrap(average, seeds) for _ in range(2)]
    assert estimates[0] == estimates[1] == pytest.approx((0.5, low, high))
    assert 0 < low < high < 0.9


def test_tasks_are_strata_unless_trained_in_the_same_runs():
    """Two tasks that rise and fall together: the mean of a stratified resample varies less than
    that of whole seeds.
    """
    column = np.linspace(0, 1, 8)
    scores = np.stack([column, column], 1)
    same = np.ptp(stats.bootstrap(average, scores, paired=True)[1:])
    separate = np.ptp(stats.bootstrap(average, scores, paired=False)[1:])
    assert same / separate == pytest.approx(np.sqrt(2), rel=0.05)
    opposed = np.stack([column, 1 - column], 1)  # whole seeds: their mean is always a half
    assert stats.bootstrap(average, opposed, paired=True) == pytest.approx([0.5] * 3)


def test_probability_of_improvement_counts_pairs():
    """Wins and half the ties over all pairs, averaged over tasks; equal methods have a half; its
    opposite is 1 - it.
    """
    x = np.array([[1.0, 5.0], [2.0, 5.0]])
    y = np.array([[0.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    pairs = [np.mean([(a > b) + (a == b) / 2 for a in x[:, k] for b in y[:, k]]) for k in range(2)]
    value, low, high = stats.probability_of_improvement(x, y)
    assert value == pytest.approx(np.mean(pairs))
    assert pairs == [pytest.approx(2.5 / 6), 0.5]
    assert low <= value <= high
    assert stats.probability_of_improvement(y, x)[0] == pytest.approx(1 - value)
    assert stats.probability_of_improvement(x + 10, y) == (1, 1, 1)
    assert stats.probability_of_improvement(x, y, paired=True)[0] == pytest.approx(value)


def test_success_rate_has_wilsons_interval():
    """By hand for 3 of 4: Wilson's formula. What reaches the threshold exactly counts; agents are
    no samples.
    """
    z = 1.959963984540054
    p = 0.75
    n = 4
    centre = p + z**2 / (2 * n)
    half = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    limits = [(centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)]
    assert stats.success_rate([0.8, 0.79, 0.9, 1.0], 0.8) == pytest.approx((0.75, *limits))
    assert 0 < stats.success_rate([1.0] * 3, 0.5)[1] < 0.5  # three of three are no certainty
    with pytest.raises(ValueError, match="one score per seed"):
        stats.success_rate([[0.8, 0.9]], 0.8)


@pytest.mark.parametrize("trials", [1, 5, 8])
def test_wilsons_interval_is_scipys(trials):
    """For every number of successes; it is never empty, and never outside [0, 1]."""
    for successes in range(trials + 1):
        expected = scipy.stats.binomtest(successes, trials).proportion_ci(method="wilson")
        limits = stats.wilson_interval(successes / trials, trials)
        assert limits == pytest.approx(tuple(expected), abs=1e-12)
        assert 0 <= limits[0] < limits[1] <= 1


def test_a_run_is_one_trial_however_many_agents_succeed():
    """Five runs whose agents all learn leave a probability of 0.57; a share between 0 and 1 counts
    as a part.
    """
    assert stats.mean_share([1.0] * 5) == pytest.approx((1, 0.5655, 1), abs=1e-4)
    assert stats.mean_share([0.0] * 5) == pytest.approx((0, 0, 0.4345), abs=1e-4)
    share, low, high = stats.mean_share([0.5, 0, 0.25, 0.125, 0.5])
    assert (share, low, high) == pytest.approx((0.275, *stats.wilson_interval(0.275, 5)))
    assert stats.mean_share([1, 0, 1, 1])[1:] == stats.success_rate([1, 0, 1, 1], 0.5)[1:]
    for shares in ([], [0.5, np.nan], [1.1], [[0.5]]):
        with pytest.raises(ValueError, match="share"):
            stats.mean_share(shares)
    for scores in ([], [0.5, np.nan]):
        with pytest.raises(ValueError, match="a score per seed"):
            stats.success_rate(scores, 0.8)


@pytest.mark.parametrize(("probability", "student"), [(0.1, 0.41), (0.5, 0.94)])
def test_coverage_where_seeds_are_all_or_nothing(probability, student):
    """All outcomes of five seeds, weighted: Student's t covers what stats.py writes, Wilson's
    formula at least 90 %.
    """
    covered = {"student": 0, "wilson": 0}
    for successes in range(6):
        weight = scipy.stats.binom.pmf(successes, 5, probability)
        seeds = np.array([1.0] * successes + [0.0] * (5 - successes))
        half = scipy.stats.t.ppf(0.975, 4) * seeds.std(ddof=1) / np.sqrt(5)
        low, high = stats.wilson_interval(seeds.mean(), 5)
        covered["student"] += weight * (abs(seeds.mean() - probability) <= half)
        covered["wilson"] += weight * (low <= probability <= high)
    assert covered["student"] == pytest.approx(student, abs=0.005)
    assert covered["wilson"] > 0.9


def test_seeds_that_solve_or_fail_are_recognised():
    """Both have to occur, and at most one seed may lie between; 0.8 solves, 0.4 does not fail any
    more.
    """
    assert stats.is_all_or_nothing([0.96, 0.0, 0.97, 0.97, 0.0])
    assert stats.is_all_or_nothing([0.97, 0.96, 0.49, 0.97, 0.07])
    assert stats.is_all_or_nothing([0.8, 0.39])
    assert not stats.is_all_or_nothing([0.62, 0.18, 0.9, 0.92, 0.61])
    assert not stats.is_all_or_nothing([0.8, 0.4])  # nobody fails
    assert not stats.is_all_or_nothing([0.79, 0.39])  # nobody solves it
    assert not stats.is_all_or_nothing([])
