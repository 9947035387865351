"""Statistics of runs: interquartile mean, chance to improve, success rate, expected maximum.

    from benchmark.stats import interquartile_mean
    interquartile_mean(scores)  # [seeds, tasks], a number for each run

The unit of replication is the seed: a run of n agents that learn from each other is one sample, so
average (or count) over its agents before anything here. Intervals are of 95 %. Bootstrap intervals
are percentiles, and too narrow for a handful of seeds: three seeds have ten different resamples.
For few seeds use Student's t, as plot.py does, but not where a seed either solves its task or
fails: there report the share of seeds that solve it, with Wilson's interval. With five seeds
Student's t covers 41 % if the probability of a success is 0.1, and 94 % if it is 0.5.

Interquartile mean and probability of improvement are those of rliable (Agarwal et al. 2021), which
cannot be imported beside the pinned pandas.
"""

from collections.abc import Callable

import numpy as np
from scipy import stats

RESAMPLES = 9999
SOLVED = 0.8  # return from which on a run counts as a success
FAILED = 0.4  # return below which it counts as a failure
Estimate = tuple[float, float, float]  # value and the limits of its interval


def bootstrap(statistic: Callable, *samples: np.ndarray, paired: bool = False) -> Estimate:
    """`statistic` of samples [seeds, tasks], and its interval: seeds are resampled in each task on
    its own (strata).

    paired: all tasks were trained in the same runs, so a seed is resampled with all its tasks.
    statistic: of arrays [..., seeds, tasks]. A sample of a single seed has no limits (NaN). Always
    the same random numbers.
    """
    samples = [np.asarray(sample, float) for sample in samples]
    for sample in samples:
        if sample.ndim != 2 or not sample.size or np.isnan(sample).any():
            raise ValueError(f"need numbers [seeds, tasks], without NaN: {sample.tolist()}")
    value = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        return value, np.nan, np.nan
    strata = [1 if paired else sample.shape[1] for sample in samples]
    rows = []  # the numbers of the seeds, once for each stratum of each sample
    for sample, count in zip(samples, strata, strict=True):
        rows += [np.arange(len(sample)) for _ in range(count)]

    def compute_on_rows(*drawn_rows: np.ndarray, axis: int) -> np.ndarray:
        """The statistic of resampled seeds; drawn_rows: [resamples, seeds] for each stratum."""
        remaining = list(drawn_rows)
        resampled = []
        for sample, count in zip(samples, strata, strict=True):
            drawn = np.stack([remaining.pop(0) for _ in range(count)], axis=-1)
            # drawn: [resamples, seeds, strata]
            if count > 1:
                resampled.append(np.take_along_axis(sample[None], drawn, 1))
            else:
                resampled.append(sample[drawn[..., 0]])
        return statistic(*resampled)

    result = stats.bootstrap(
        rows,
        compute_on_rows,
        n_resamples=RESAMPLES,
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    interval = result.confidence_interval
    return value, float(interval.low), float(interval.high)


def interquartile_mean(scores: np.ndarray, paired: bool = False) -> Estimate:
    """Mean of the middle half of all scores [seeds, tasks]; of fewer than four scores, the mean."""

    def trim_and_average(scores: np.ndarray) -> np.ndarray:
        flat = scores.reshape(*scores.shape[:-2], -1)
        return stats.trim_mean(flat, 0.25, axis=-1)

    return bootstrap(trim_and_average, scores, paired=paired)


def probability_of_improvement(x: np.ndarray, y: np.ndarray, paired: bool = False) -> Estimate:
    """P(X > Y) + P(X = Y) / 2 of a run of method X and one of method Y, averaged over tasks."""

    def count_superior_pairs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # of its p-values, where all scores are equal
            pairs = stats.mannwhitneyu(x, y, axis=-2, method="asymptotic").statistic
        return pairs.mean(axis=-1) / (x.shape[-2] * y.shape[-2])

    return bootstrap(count_superior_pairs, x, y, paired=paired)


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Limits of Wilson's score interval for a share of `trials`; the share times the trials need
    not be an integer.
    """
    z = stats.norm.ppf(0.975)
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    variance = share * (1 - share) / trials + z**2 / (4 * trials**2)
    half = z * np.sqrt(variance) / (1 + z**2 / trials)
    return float(max(centre - half, 0)), float(min(centre + half, 1))


def success_rate(scores: np.ndarray, threshold: float) -> Estimate:
    """Share of seeds, one score each, that reach `threshold`; Wilson's interval, which holds for
    few seeds too.
    """
    scores = np.asarray(scores, float)
    if scores.ndim != 1:
        raise ValueError("one score per seed: agents of a run are not independent")
    if not len(scores) or np.isnan(scores).any():
        raise ValueError(f"need a score per seed, without NaN: {scores.tolist()}")
    share = float((scores >= threshold).mean())
    return share, *wilson_interval(share, len(scores))


def mean_share(shares: np.ndarray) -> Estimate:
    """Mean over seeds of the share of a run's agents that succeed; Wilson's interval with the seed
    as the trial.

    Agents of a run are not independent, so their number is not a number of trials. A share lies in
    [0, 1], and so its variance over seeds is at most p (1 - p), that of runs whose agents all
    succeed or all fail. Wilson's formula with one trial per seed assumes this worst case: it is
    wide enough for any dependence, too wide for independent agents.
    """
    shares = np.asarray(shares, float)
    if shares.ndim != 1 or not len(shares) or not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(f"need a share in [0, 1] per seed: {shares.tolist()}")
    share = float(shares.mean())
    return share, *wilson_interval(share, len(shares))


def is_all_or_nothing(scores: np.ndarray) -> bool:
    """Whether seeds either solve the task or fail: both occur, and at most one seed lies between.

    The mean of such scores has no useful interval by Student's t; `success_rate` has one.
    """
    scores = np.asarray(scores, float)
    solved = (scores >= SOLVED).sum()
    failed = (scores < FAILED).sum()
    return bool(solved and failed and solved + failed >= len(scores) - 1)


def expected_maximum(
    scores: np.ndarray,
    replacement: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Expected validation performance: mean and variance of the best of n = 1..N out of N results,
    arrays [N].

    With replacement (Dodge et al. 2019), or without (Tang et al. 2020; Dodge et al. 2021), the
    unbiased estimate of the best of n new trials. P(all n draws are among the i lowest) is (i/N)^n,
    or C(i, n) / C(N, n), which is computed draw by draw; its differences weigh the order
    statistics, so that ties need no care.
    """
    scores = np.sort(np.asarray(scores, float))
    if scores.ndim != 1 or not len(scores) or np.isnan(scores[-1]):
        raise ValueError(f"need the results of a search, without NaN: {scores.tolist()}")
    total = len(scores)
    lowest = np.arange(total + 1)
    removed = np.zeros((total, 1))  # results that are gone before each draw
    if not replacement:
        removed[:, 0] = np.arange(total)
    probability = np.cumprod(np.maximum(lowest - removed, 0) / (total - removed), axis=0)  # [n, i]
    weights = np.diff(probability, axis=1)
    mean = weights @ scores
    variance = (weights * (scores - mean[:, None]) ** 2).sum(axis=1)
    return mean, variance
