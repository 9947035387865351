"""Statistics of runs, by scipy: interquartile mean, probability of improvement, success rate, expected maximum.

    from benchmark.stats import interquartile_mean
    interquartile_mean(scores)  # [seeds, tasks], a number for each run

The unit of replication is the seed: a run of n agents that learn from each other is one sample, so average (or count)
over its agents before anything here. Intervals are of 95 %. Bootstrap intervals are percentiles, and too narrow for a
handful of seeds: three seeds have ten different resamples. For few seeds take Student's t, as plot.py does.

Interquartile mean and probability of improvement are those of rliable (Agarwal et al. 2021), which cannot be imported
beside the pinned pandas.
"""

from collections.abc import Callable

import numpy as np
from scipy import stats

RESAMPLES = 9999
Estimate = tuple[float, float, float]  # value and the limits of its interval


def bootstrap(statistic: Callable, *samples: np.ndarray, paired: bool = False) -> Estimate:
    """`statistic` of samples [seeds, tasks], and its interval: seeds are resampled in each task on its own (strata).

    paired: all tasks were trained in the same runs, so a seed is resampled with all its tasks. statistic: of arrays
    [..., seeds, tasks]. A sample of a single seed has no limits (NaN). Always the same random numbers.
    """
    samples = [np.asarray(sample, float) for sample in samples]
    for sample in samples:
        if sample.ndim != 2 or not sample.size or np.isnan(sample).any():
            raise ValueError(f"need numbers [seeds, tasks], without NaN: {sample.tolist()}")
    value = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        return value, np.nan, np.nan
    strata = [1 if paired else sample.shape[1] for sample in samples]
    rows = [np.arange(len(sample)) for sample, count in zip(samples, strata, strict=True) for _ in range(count)]

    def of_rows(*drawn: np.ndarray, axis: int) -> np.ndarray:  # `drawn`: [resamples, seeds] for each stratum
        drawn, resampled = list(drawn), []
        for sample, count in zip(samples, strata, strict=True):
            picked = np.stack([drawn.pop(0) for _ in range(count)], axis=-1)  # [resamples, seeds, strata]
            resampled.append(np.take_along_axis(sample[None], picked, 1) if count > 1 else sample[picked[..., 0]])
        return statistic(*resampled)

    found = stats.bootstrap(
        rows,
        of_rows,
        n_resamples=RESAMPLES,
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return value, float(found.confidence_interval.low), float(found.confidence_interval.high)


def interquartile_mean(scores: np.ndarray, paired: bool = False) -> Estimate:
    """Mean of the middle half of all scores [seeds, tasks]; with fewer than four scores, the mean."""

    def trimmed(scores: np.ndarray) -> np.ndarray:
        return stats.trim_mean(scores.reshape(*scores.shape[:-2], -1), 0.25, axis=-1)

    return bootstrap(trimmed, scores, paired=paired)


def probability_of_improvement(x: np.ndarray, y: np.ndarray, paired: bool = False) -> Estimate:
    """P(X > Y) + P(X = Y) / 2 of a run of method X and one of method Y, averaged over tasks."""

    def superior(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # of its p-values, where all scores are equal
            pairs = stats.mannwhitneyu(x, y, axis=-2, method="asymptotic").statistic
        return pairs.mean(axis=-1) / (x.shape[-2] * y.shape[-2])

    return bootstrap(superior, x, y, paired=paired)


def success_rate(scores: np.ndarray, threshold: float) -> Estimate:
    """Share of seeds, one score each, that reach `threshold`; Wilson's interval, which holds for few seeds too."""
    scores = np.asarray(scores, float)
    if scores.ndim != 1:
        raise ValueError("one score per seed: reduce a run's agents first, they are not independent")
    test = stats.binomtest(int((scores >= threshold).sum()), len(scores))
    return test.statistic, *map(float, test.proportion_ci(method="wilson"))


def expected_maximum(scores: np.ndarray, replacement: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Expected validation performance: mean and variance of the best of n = 1..N out of N results, arrays [N].

    With replacement (Dodge et al. 2019), or without (Tang et al. 2020; Dodge et al. 2021), the unbiased estimate of
    the best of n new trials. P(all n draws are among the i lowest) is (i/N)^n, or C(i, n) / C(N, n), which is made
    draw by draw; its differences weigh the order statistics, so that ties need no care.
    """
    scores = np.sort(np.asarray(scores, float))
    if scores.ndim != 1 or not len(scores) or np.isnan(scores[-1]):
        raise ValueError(f"need the results of a search, without NaN: {scores.tolist()}")
    total = len(scores)
    gone, lowest = np.arange(total)[:, None] * (not replacement), np.arange(total + 1)
    among = np.cumprod(np.maximum(lowest - gone, 0) / (total - gone), axis=0)  # [n, i]
    weights = np.diff(among, axis=1)
    mean = weights @ scores
    return mean, (weights * (scores - mean[:, None]) ** 2).sum(axis=1)
