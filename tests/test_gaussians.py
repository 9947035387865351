"""The mathematics of Gaussian policies: densities, mixtures, the penalty, similarities, distances.

What has an integral is compared with sums over a grid, in one and two dimensions, whose densities
are those of torch.distributions.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence

import communicators
from communicators import (
    Gaussians,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    kl_to_gaussians,
    match_moments,
    measure_gaussians,
    mix_gaussians,
    similarity_of_gaussians,
)

NAN = math.nan
MIXTURES = "arithmetic", "geometric"
DIRECTIONS = "forward", "reverse"
DIMENSIONS = pytest.mark.parametrize("dimensions", [1, 2])
examples = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
few_examples = settings(examples, max_examples=8)
seeds = st.integers(0, 2**32)
close = {"rtol": 1e-6, "atol": 1e-8}

# The sum over a grid of this step is the integral up to 1e-10 for the deviations below
STEP = 0.125
REACH = 11.0


def make_grid(dimensions):
    """Points [points, dimensions]; the integral of f is their sum of f times the cell's size."""
    axis = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.double)
    return torch.cartesian_prod(*[axis] * dimensions).view(-1, dimensions)


def density(points, mean, log_std):
    """log p at the points, of a Gaussian with mean and log_std [dimensions]: [points]."""
    return Independent(Normal(mean, log_std.exp()), 1).log_prob(points)


def integral(values, dimensions):
    """Of a function whose values on the grid are `values` [..., points]."""
    return values.sum(-1) * STEP**dimensions


def draw(seed, *shape):
    """Means and log standard deviations of some policies, [..., dimensions] each."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.rand(shape, generator=generator, dtype=torch.double) - 1.5
    log_stds = 1.2 * torch.rand(shape, generator=generator, dtype=torch.double) - 0.8
    return means, log_stds


def draw_weights(seed, *shape):
    """Points on the simplex, whose corners are the first dimension."""
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return (weights + 0.1) / (weights + 0.1).sum(0)


def mixture_on(points, means, log_stds, weights, mixture):
    """The log-density of a mixture in one state: means, log_stds [policies, dimensions]."""
    of_policies = torch.stack(
        [density(points, *policy) for policy in zip(means, log_stds, strict=True)]
    )
    if mixture == "arithmetic":
        return (of_policies + weights.log()[:, None]).logsumexp(0)
    product = (weights[:, None] * of_policies).sum(0)
    return product - integral(product.exp(), points.shape[1]).log()


def differences(function, values, step=1e-4):
    """The gradient of a number with respect to `values` [n], by central differences."""
    slopes = []
    for k in range(len(values)):
        change = torch.zeros_like(values)
        change[k] = step
        slopes.append((function(values + change) - function(values - change)) / (2 * step))
    return torch.stack(slopes)


# --- densities, entropies, divergences ---


@examples
@given(seeds, st.integers(1, 3), st.integers(1, 6))
def test_densities_entropies_and_divergences_are_those_of_torch(seed, states, dimensions):
    """For a spread per state and for one spread of all states."""
    mean_p, log_std_p = draw(seed, states, dimensions)
    mean_q, log_std_q = draw(seed + 1, states, dimensions)
    actions, _ = draw(seed + 2, 5, states, dimensions)
    for spread in (log_std_p, log_std_p[0]):
        p = Independent(Normal(mean_p, spread.exp()), 1)
        q = Independent(Normal(mean_q, log_std_q.exp()), 1)
        log_probs = gaussian_log_prob(actions, mean_p, spread)
        torch.testing.assert_close(log_probs, p.log_prob(actions), **close)
        entropy = gaussian_entropy(spread).expand(states)
        torch.testing.assert_close(entropy, p.entropy(), **close)
        forth = gaussian_kl(mean_p, spread, mean_q, log_std_q)
        torch.testing.assert_close(forth, kl_divergence(p, q), **close)
        back = gaussian_kl(mean_q, log_std_q, mean_p, spread)
        torch.testing.assert_close(back, kl_divergence(q, p), **close)


@examples
@given(seeds, st.integers(1, 6))
def test_divergences_are_positive_but_for_equals(seed, dimensions):
    """Of equals they are 0 exactly, and so are their gradients: rounding moves no policy."""
    means, log_stds = (values.float() for values in draw(seed, 2, dimensions))
    assert gaussian_kl(means[0], log_stds[0], means[1], log_stds[1]) > 0
    for direction in DIRECTIONS:
        mean = means[:1].clone().requires_grad_()
        log_std = log_stds[0].clone().requires_grad_()
        itself = Gaussians(torch.ones(1, 1), means[None, :1], log_stds[None, :1])
        kl = kl_to_gaussians(mean, log_std, itself, direction)
        assert kl.tolist() == [0]
        for gradient in torch.autograd.grad(kl.sum(), (mean, log_std)):
            assert not gradient.any()


# --- mixtures ---


@DIMENSIONS
@pytest.mark.parametrize("mixture", MIXTURES)
@few_examples
@given(seed=seeds)
def test_mixtures_are_those_on_a_grid(mixture, dimensions, seed):
    """Geometric: the renormalised product. Weights of all states, and of each."""
    points = make_grid(dimensions)
    means, log_stds = draw(seed, 3, 2, dimensions)
    for weights in (draw_weights(seed, 3), draw_weights(seed, 3, 2)):
        mixed = mix_gaussians(means, log_stds, weights, mixture)
        by_state = weights.view(3, -1).expand(3, 2)
        torch.testing.assert_close(mixed.weights.sum(0), torch.ones(2).double(), **close)
        assert len(mixed.weights) == (3 if mixture == "arithmetic" else 1)
        for state in range(2):
            expected = mixture_on(
                points, means[:, state], log_stds[:, state], by_state[:, state], mixture
            )
            log_density = log_density_of(mixed, state, points)
            assert integral(log_density.exp(), dimensions).item() == pytest.approx(1, abs=1e-8)
            torch.testing.assert_close(log_density.exp(), expected.exp(), **close)


def log_density_of(mixed, state, points):
    """The log-density of a reference in one state, [points]."""
    of_policies = []
    for weight, mean, log_std in zip(*(values[:, state] for values in mixed), strict=True):
        of_policies.append(weight.log() + density(points, mean, log_std))
    return torch.stack(of_policies).logsumexp(0)


@pytest.mark.parametrize("mixture", MIXTURES)
@examples
@given(
    seed=seeds,
    bad=st.sampled_from([NAN, math.inf, -math.inf, 1e30]),
    where=st.sampled_from(["mean", "log_std"]),
    dimension=st.integers(0, 1),
)
def test_a_policy_without_a_density_has_no_influence_in_that_state(
    mixture, seed, bad, where, dimension
):
    """In the other states it has. One dimension is enough; squares must not overflow, either."""
    means, log_stds = (values.float() for values in draw(seed, 3, 4, 2))
    weights = draw_weights(seed, 3, 4).float()
    (means if where == "mean" else log_stds)[1, 2, dimension] = bad
    reference = mix_gaussians(means, log_stds, weights, mixture)
    without = mix_gaussians(means[[0, 2]], log_stds[[0, 2]], weights[[0, 2]], mixture)
    for direction, noise in (("forward", None), ("reverse", torch.randn(5, 4, 2))):
        kls = []
        for mixed in (reference, without):
            compared = match_moments(mixed) if direction == "forward" else mixed
            kls.append(
                kl_to_gaussians(torch.zeros(4, 2), torch.zeros(2), compared, direction, noise)
            )
        assert kls[0].isfinite().all()
        torch.testing.assert_close(kls[0][..., 2], kls[1][..., 2], rtol=1e-4, atol=1e-5)
        assert (kls[0] - kls[1])[..., [0, 1, 3]].abs().max() > 1e-3


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(examples, max_examples=150)
@given(
    exponent=st.floats(-5, 20),
    log_std=st.floats(-45, 45),
    own_log_std=st.floats(-2, 2),
    weight=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_the_gradient_towards_mixed_policies_does_not_overflow(
    mixture, direction, exponent, log_std, own_log_std, weight
):
    """Nor does its square, summed over a network's thousands of parameters.

    A KL of 1e20 is a finite number, and an update towards it is none.
    """
    means = torch.zeros(2, 4, 2)
    means[1] = 10**exponent
    log_stds = torch.zeros(2, 4, 2)
    log_stds[1] = log_std
    if weight == 1 and not communicators.are_bounded(means, log_stds)[1].all():
        return  # nobody is left
    mixed = mix_gaussians(means, log_stds, torch.tensor([1 - weight, weight]), mixture)
    if direction == "forward":
        mixed = match_moments(mixed)
    policy = torch.zeros(4, 2, requires_grad=True)
    spread = torch.full((2,), own_log_std, requires_grad=True)
    noise = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    kl_to_gaussians(policy, spread, mixed, direction, noise).mean().backward()
    for gradient in (policy.grad, spread.grad):
        assert (1e5 * gradient.square().sum()).isfinite()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_policy_of_weight_0_has_no_influence(mixture):
    """Whatever it is."""
    means, log_stds = draw(0, 3, 4, 2)
    weights = torch.tensor([0.3, 0.0, 0.7]).double()
    expected = mix_gaussians(means[[0, 2]], log_stds[[0, 2]], weights[[0, 2]], mixture)
    for value in (0.0, 1e300, NAN, math.inf):
        means[1] = value
        log_stds[1, 2:] = value
        mixed = mix_gaussians(means, log_stds, weights, mixture)
        moments = match_moments(mixed)
        torch.testing.assert_close(moments, match_moments(expected), **close)
        noise = torch.ones(1, 4, 2).double()
        policy = torch.zeros(4, 2).double(), torch.zeros(2).double()
        kl = kl_to_gaussians(*policy, mixed, "reverse", noise)
        torch.testing.assert_close(kl, kl_to_gaussians(*policy, expected, "reverse", noise))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_where_no_policy_is_left_the_mixture_is_nan(mixture):
    """There only: nobody's penalty is a number that has no meaning."""
    means, log_stds = draw(0, 2, 3, 2)
    means[:, 1] = NAN
    mixed = mix_gaussians(means, log_stds, torch.tensor([0.5, 0.5]), mixture)
    policy = torch.zeros(3, 2).double(), torch.zeros(2).double()
    for reference, direction in ((match_moments(mixed), "forward"), (mixed, "reverse")):
        kl = kl_to_gaussians(*policy, reference, direction, torch.ones(1, 3, 2).double())
        assert kl.isnan().flatten().tolist() == [False, True, False]


@examples
@given(seeds, st.floats(-8, 8))
def test_the_moments_of_one_gaussian_are_its_own(seed, log_std):
    """Bit for bit, so that a penalty without peers is that to the policy before the update."""
    means, _ = draw(seed, 1, 4, 3)
    alone = mix_gaussians(means.float(), torch.full((1, 4, 3), log_std), torch.ones(1))
    for values, expected in zip(match_moments(alone), alone, strict=True):
        assert torch.equal(values, expected)


def test_the_mixtures_of_some_states():
    means, log_stds = draw(0, 3, 5, 2)
    mixed = mix_gaussians(means, log_stds, draw_weights(0, 3, 5))
    taken = mixed.take(torch.tensor([4, 1]))
    for values, expected in zip(taken, mixed, strict=True):
        assert torch.equal(values, torch.stack([expected[:, 4], expected[:, 1]], dim=1))


# --- the penalty ---


def integrated_kl(points, policy, log_reference, direction):
    """KL on the grid. policy: mean and log_std [2 dimensions]; log_reference: [points]."""
    log_policy = density(points, *policy.view(2, -1))
    if direction == "forward":
        return integral(log_reference.exp() * (log_reference - log_policy), points.shape[1])
    return integral(log_policy.exp() * (log_policy - log_reference), points.shape[1])


def penalty(policy, reference, direction, noise=None):
    """The penalty of a policy, mean and log_std [2 dimensions], in one state."""
    mean, log_std = policy.view(2, -1)
    return kl_to_gaussians(mean[None], log_std, reference, direction, noise)


def gradient_of(function, policy):
    """The gradient of a number at a policy, by autograd."""
    policy = policy.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(policy), policy)
    return gradient


def draw_case(seed, dimensions, mixture):
    """The grid, the reference of three policies in one state, and its log-density there."""
    points = make_grid(dimensions)
    means, log_stds = draw(seed, 3, 1, dimensions)
    weights = draw_weights(seed, 3)
    reference = mix_gaussians(means, log_stds, weights, mixture)
    return points, reference, mixture_on(points, means[:, 0], log_stds[:, 0], weights, mixture)


@DIMENSIONS
@pytest.mark.parametrize("mixture", MIXTURES)
@few_examples
@given(seed=seeds)
def test_the_forward_penalty_is_the_kl_of_eq_4_but_for_a_constant(mixture, dimensions, seed):
    """Whatever the policy. The gradient has no constant. To a product of Gaussians it is exact."""
    points, mixed, log_reference = draw_case(seed, dimensions, mixture)
    reference = match_moments(mixed)
    constants = []
    for policy in torch.cat(draw(seed + 1, 3, dimensions), dim=1):
        kl = integrated_kl(points, policy, log_reference, "forward")
        constants.append((kl - penalty(policy, reference, "forward")[0]).item())
        expected = differences(lambda x: integrated_kl(points, x, log_reference, "forward"), policy)
        gradient = gradient_of(lambda x: penalty(x, reference, "forward").sum(), policy)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    assert constants == pytest.approx([constants[0]] * 3, abs=1e-6)
    if mixture == "geometric":
        assert constants[0] == pytest.approx(0, abs=1e-6)


@DIMENSIONS
@few_examples
@given(seed=seeds)
def test_the_reverse_penalty_to_a_product_is_exact(dimensions, seed):
    points, reference, log_reference = draw_case(seed, dimensions, "geometric")
    for policy in torch.cat(draw(seed + 1, 3, dimensions), dim=1):
        kl = integrated_kl(points, policy, log_reference, "reverse")
        torch.testing.assert_close(penalty(policy, reference, "reverse")[0], kl, **close)
        expected = differences(lambda x: integrated_kl(points, x, log_reference, "reverse"), policy)
        gradient = gradient_of(lambda x: penalty(x, reference, "reverse").sum(), policy)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@DIMENSIONS
@pytest.mark.parametrize("seed", range(3))
def test_the_reverse_penalty_to_a_mixture_is_right_on_average(dimensions, seed):
    """Its mean over samples is the integral, its gradient's mean the integral's gradient.

    Both up to five standard errors, which are small.
    """
    points, reference, log_reference = draw_case(seed, dimensions, "arithmetic")
    policy = torch.cat(draw(seed + 10, dimensions))
    generator = torch.Generator().manual_seed(seed)
    kls = []
    gradients = []
    for _ in range(200):
        noise = torch.randn(500, 1, dimensions, generator=generator, dtype=torch.double)
        kls.append(penalty(policy, reference, "reverse", noise).mean())
        gradients.append(
            gradient_of(lambda x, e=noise: penalty(x, reference, "reverse", e).mean(), policy)
        )
    kl = integrated_kl(points, policy, log_reference, "reverse")
    slopes = differences(lambda x: integrated_kl(points, x, log_reference, "reverse"), policy)
    for values, expected in ((torch.stack(kls), kl), (torch.stack(gradients), slopes)):
        error = values.std(0) / len(values) ** 0.5
        assert (error < 0.02).all()
        assert ((values.mean(0) - expected).abs() < 5 * error).all()
    assert kl > 0.02
    assert slopes.abs().max() > 0.1


@examples
@given(seeds, st.integers(1, 3))
def test_samples_have_states_of_their_own(seed, samples):
    """Each sample in each state is log policy - log mixture there, by loops over numbers."""
    means, log_stds = draw(seed, 3, 4, 2)
    weights = draw_weights(seed, 3, 4)
    mean, spreads = draw(seed + 1, 4, 2)
    noise, _ = draw(seed + 2, samples, 4, 2)
    reference = mix_gaussians(means, log_stds, weights)
    kls = kl_to_gaussians(mean, spreads[0], reference, "reverse", noise)
    assert kls.shape == (samples, 4)
    for sample in range(samples):
        for state in range(4):
            action = mean[state] + spreads[0].exp() * noise[sample, state]
            total = 0.0
            for j in range(3):
                total += (
                    weights[j, state] * density(action, means[j, state], log_stds[j, state]).exp()
                )
            expected = density(action, mean[state], spreads[0]) - total.log()
            torch.testing.assert_close(kls[sample, state], expected, **close)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_gradient_reaches_peers(mixture, direction):
    means, log_stds = (values.requires_grad_() for values in draw(0, 3, 4, 2))
    weights = draw_weights(0, 3).requires_grad_()
    reference = mix_gaussians(means, log_stds, weights, mixture)
    if direction == "forward":
        reference = match_moments(reference)
    mean, log_std = (values.requires_grad_() for values in draw(1, 4, 2))
    kl = kl_to_gaussians(mean, log_std[0], reference, direction, torch.ones(1, 4, 2).double())
    kl.sum().backward()
    assert mean.grad.abs().min() > 0
    assert means.grad is log_stds.grad is weights.grad is None


def test_what_mixes_or_measures_otherwise_is_refused():
    means, log_stds = draw(0, 2, 3, 2)
    with pytest.raises(ValueError, match="'harmonic'; choose from arithmetic, geometric"):
        mix_gaussians(means, log_stds, torch.ones(2) / 2, "harmonic")
    reference = mix_gaussians(means, log_stds, torch.ones(2) / 2)
    with pytest.raises(ValueError, match="'sideways'; choose from forward, reverse"):
        kl_to_gaussians(means[0], log_stds[0, 0], reference, "sideways")


# --- similarities and distances on public states ---


def draw_policies(seed, agents, states, dimensions):
    """[agents, states, 2, dimensions]."""
    return torch.stack(draw(seed, agents, states, dimensions), dim=2)


def densities(policies):
    """p on the grid, [agents, states, points]."""
    points = make_grid(policies.shape[-1])
    rows = [[density(points, *of_state).exp() for of_state in agent] for agent in policies]
    return torch.stack([torch.stack(row) for row in rows])


@DIMENSIONS
@few_examples
@given(seed=seeds)
def test_similarity_is_example_3(dimensions, seed):
    """The inner products of densities, summed over states; rows on the simplex."""
    p = densities(draw_policies(seed, 3, 2, dimensions))
    overlaps = torch.einsum("isx,jsx->ij", p, p)
    expected = overlaps / overlaps.sum(1, keepdim=True)
    matrix = similarity_of_gaussians(draw_policies(seed, 3, 2, dimensions))
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix, expected.float(), rtol=1e-5, atol=1e-6)
    assert (matrix - matrix.T).abs().max() > 1e-4  # the test would see a transposed one


def test_similarity_gives_no_weight_to_an_unknown_policy():
    policies = draw_policies(0, 4, 3, 2).float()
    expected = similarity_of_gaussians(policies[[0, 1, 3]])
    policies[2] = NAN
    matrix = similarity_of_gaussians(policies)
    rows = matrix[[0, 1, 3]]
    torch.testing.assert_close(rows[:, [0, 1, 3]], expected)
    assert not rows[:, 2].any()
    assert matrix.sum(1).tolist() == pytest.approx([1] * 4)


@examples
@given(seeds, st.sampled_from([1.0, 1e3, 1e8]), st.sampled_from([-44.0, 0.0, 8.0, 44.0]))
def test_similarity_of_distant_policies_is_a_number(seed, scale, log_std):
    """Overlaps of strangers are 0 in any precision, and even one's own may be, or infinite.

    Of equal spreads nobody is nearer than oneself.
    """
    policies = draw_policies(seed, 3, 2, 18)
    policies[:, :, 0] *= scale
    policies[:, :, 1] = log_std
    matrix = similarity_of_gaussians(policies.float())
    assert (matrix >= 0).all()
    assert matrix.sum(1).tolist() == pytest.approx([1] * 3)
    assert (matrix.diagonal() >= matrix.max(1).values - 1e-6).all()
    if scale > 1 and log_std < 8:
        assert torch.equal(matrix, torch.eye(3))


EVERYBODY = torch.ones(3, 3, dtype=torch.bool)


@DIMENSIONS
@few_examples
@given(seed=seeds)
def test_distances_are_those_of_hellinger(dimensions, seed):
    """By integration; symmetric; the total variation lies between what the docstring says."""
    policies = draw_policies(seed, 3, 2, dimensions)
    p = densities(policies)
    distances = measure_gaussians(policies, EVERYBODY, range(3)).double()
    affinity = integral((p[:, None] * p[None]).sqrt(), dimensions)
    expected = (1 - affinity).clamp(min=0).sqrt().mean(-1)
    torch.testing.assert_close(distances, expected, rtol=0, atol=1e-4)
    assert torch.equal(distances, distances.T)
    total_variation = integral((p[:, None] - p[None]).abs(), dimensions).mean(-1) / 2
    apart = ~torch.eye(3, dtype=torch.bool)
    assert (distances**2 <= total_variation + 1e-4)[apart].all()
    assert (total_variation <= 1.42 * distances + 1e-4)[apart].all()


@examples
@given(seeds, st.sampled_from([1e-3, 1.0, 1e3, 1e10]), st.floats(-20, 20))
def test_distances_lie_in_0_to_1(seed, scale, log_std):
    """0 for equals, 1 for strangers."""
    policies = draw_policies(seed, 3, 4, 6)
    policies[:, :, 0] *= scale
    policies[:, :, 1] += log_std
    policies[2] = policies[0]
    distances = measure_gaussians(policies.float(), EVERYBODY, range(3))
    assert ((distances >= 0) & (distances <= 1)).all()
    assert distances.diagonal().tolist() == [0] * 3
    assert distances[0, 2] == distances[2, 0] == 0
    assert distances[0, 1] > 0
    if scale / math.exp(log_std) > 1e4:
        assert distances[0, 1] == 1


def test_distances_of_listeners_to_whom_they_compare_with():
    """NaN for others, and for agents without a usable snapshot."""
    policies = draw_policies(0, 4, 3, 2)
    everything = measure_gaussians(policies, torch.ones(4, 4, dtype=torch.bool), range(4))
    compared = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).bool()
    policies[3] = NAN
    distances = measure_gaussians(policies, compared, range(1, 3))
    for i in range(4):
        for j in range(4):
            if i in (1, 2) and compared[i, j] and j != 3:
                assert distances[i, j] == everything[i, j]
            else:
                assert distances[i, j].isnan()
    assert not torch.equal(everything, everything.T.roll(1, 0))
    assert communicators.find_compared(compared).all()
