"""ppo.py: every equation against brute force or a closed form, then updates, batches and runs."""

import contextlib
import inspect
import itertools
import json
import math
import signal
import warnings
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ppo
import tests.probes
from ppo import (
    Agent,
    Args,
    Batch,
    RunningMeanStd,
    TrainingError,
    UsageError,
    categorical_log_prob_and_entropy,
    collect,
    compute_gae,
    compute_returns,
    discounted_sums,
    gaussian_log_prob_and_entropy,
    mixture_log_prob,
    normalize,
    ppo_policy_loss,
    prepare_batch,
    sample_categorical,
    start_envs,
    tanh_network,
    train,
    update,
    value_loss,
)

torch.set_num_threads(1)
quick = settings(deadline=None, max_examples=60)


def column(*values):
    """One environment: [T] numbers as [T, 1]."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)[:, None]


def close(actual, expected, **tolerance):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, **{"rtol": 1e-7, "atol": 1e-9, **tolerance})


@st.composite
def rollouts(draw):
    """Rewards, values, next values, terminated, truncated, all [T, N], and two discounts."""
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numbers = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    terminated, truncated = torch.rand(2, *shape, generator=generator) < 0.2
    gamma, gae_lambda = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    return *numbers, terminated, truncated, gamma, gae_lambda


# ------------------------------------------------------------------------ advantages and returns


@quick
@given(rollouts())
def test_gae_is_the_discounted_sum_of_td_errors(rollout):
    """Schulman et al. 2016, eq. 16, term by term, up to the end of the episode."""
    rewards, values, next_values, terminated, truncated, gamma, gae_lambda = rollout
    done = terminated | truncated
    expected = torch.zeros_like(rewards)
    for t, n in itertools.product(*map(range, rewards.shape)):
        for k in range(t, len(rewards)):
            following = 0 if terminated[k, n] else next_values[k, n]
            delta = rewards[k, n] + gamma * following - values[k, n]
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if done[k, n]:
                break
    close(compute_gae(*rollout[:3], terminated, done, gamma, gae_lambda), expected)


@quick
@given(rollouts())
def test_gae_is_a_mixture_of_n_step_advantages(rollout):
    """Schulman et al. 2016, eq. 11 to 16: (1 - lambda) lambda^(n-1) times n-step return minus V."""
    rewards, values, next_values, terminated, truncated, gamma, gae_lambda = rollout
    done = terminated | truncated
    next_values[:-1] = torch.where(done[:-1], next_values[:-1], values[1:])  # as in real rollouts
    expected = torch.zeros_like(rewards)
    for t, n in itertools.product(*map(range, rewards.shape)):
        last = next((k for k in range(t, len(rewards)) if done[k, n]), len(rewards) - 1)
        total, weights = 0.0, 0.0
        for k in range(t, last + 1):
            total += gamma ** (k - t) * rewards[k, n]
            following = 0 if terminated[k, n] else next_values[k, n]
            weight = gae_lambda ** (k - t) * (1 if k == last else 1 - gae_lambda)
            expected[t, n] += weight * (total + gamma ** (k - t + 1) * following - values[t, n])
            weights += weight
        assert weights == pytest.approx(1)
    close(compute_gae(*rollout[:3], terminated, done, gamma, gae_lambda), expected)


@quick
@given(rollouts())
def test_returns_equal_the_sum_written_out(rollout):
    rewards, _, bootstrap, terminated, truncated, gamma, _ = rollout
    done = terminated | truncated
    expected = torch.zeros_like(rewards)
    for t, n in itertools.product(*map(range, rewards.shape)):
        for k in range(t, len(rewards)):
            expected[t, n] += gamma ** (k - t) * rewards[k, n]
            if done[k, n] or k == len(rewards) - 1:
                expected[t, n] += gamma ** (k - t + 1) * bootstrap[k, n]
                break
    close(compute_returns(rewards, done, bootstrap, gamma), expected)


@quick
@given(rollouts())
def test_gae_with_lambda_one_is_returns_minus_values(rollout):
    rewards, values, next_values, terminated, truncated, gamma, _ = rollout
    done = terminated | truncated
    next_values[:-1] = torch.where(done[:-1], next_values[:-1], values[1:])  # as in real rollouts
    returns = compute_returns(rewards, done, next_values * ~terminated, gamma)
    gae = compute_gae(rewards, values, next_values, terminated, done, gamma, 1.0)
    close(gae, returns - values)


@quick
@given(rollouts())
def test_environments_are_independent_and_inputs_unchanged(rollout):
    *fields, truncated, gamma, gae_lambda = rollout
    fields.append(fields[-1] | truncated)
    before = [field.clone() for field in fields]
    gae = compute_gae(*fields, gamma, gae_lambda)
    returns = compute_returns(fields[0], fields[4], fields[2], gamma)
    for n in range(fields[0].shape[1]):
        own = [field[:, n : n + 1] for field in fields]
        assert torch.equal(gae[:, n : n + 1], compute_gae(*own, gamma, gae_lambda))
        assert torch.equal(returns[:, n : n + 1], compute_returns(own[0], own[4], own[2], gamma))
    assert all(map(torch.equal, fields, before))


def test_gae_by_hand():
    none, last = flags(0, 0, 0), flags(0, 0, 1)
    rewards, zeros = column(1, 1, 1), column(0, 0, 0)
    final = column(0, 0, 10)  # V = 0 but for the final observation
    close(compute_gae(rewards, zeros, final, none, last, 1.0, 1.0), column(13, 12, 11))
    close(compute_gae(rewards, zeros, final, last, last, 1.0, 1.0), column(3, 2, 1))
    tens = column(10, 10, 10)
    truncated = compute_gae(rewards, tens, tens, none, last, 0.99, 0.95)
    close(truncated, column(2.54254, 1.74645, 0.9), atol=1e-4)
    terminated = compute_gae(rewards, tens, tens, last, last, 0.99, 0.95)
    close(terminated, column(-6.21441, -7.5645, -9.0), atol=1e-4)


def test_returns_by_hand():
    zeros, ends = column(*[0] * 6), flags(0, 0, 1, 0, 0, 1)
    returns = compute_returns(column(*[1] * 6), ends, zeros, 0.99)
    close(returns, column(*[2.9701, 1.99, 1.0] * 2))
    cut = compute_returns(column(1, 1, 1), flags(0, 1, 0), column(100, 10, 20), 0.5)
    close(cut, column(1 + 0.5 * 6, 1 + 5, 1 + 10))


def test_a_final_crash_is_charged_to_the_last_action():
    """Reversed order would charge the first one, an index off by one the wrong step."""
    rewards, zeros = column(0, 0, 0, -100), column(0, 0, 0, 0)
    crash = flags(0, 0, 0, 1)
    returns = compute_returns(rewards, crash, zeros, 0.5)
    close(returns, column(-12.5, -25, -50, -100))
    gae = compute_gae(rewards, zeros, zeros, crash, crash, 0.5, 0.5)
    close(gae, column(-1.5625, -6.25, -25, -100))


SOURCES = {function: inspect.getsource(function) for function in (compute_returns, compute_gae)}


def slipped(function, old, new):
    """A function with a slip worked into its source."""
    assert old in SOURCES[function]
    namespace = {"torch": torch}
    exec(SOURCES[function].replace(old, new), namespace)
    return namespace[function.__name__]


@pytest.mark.parametrize(
    "change",
    [
        ("reversed(range(len(rewards)))", "range(len(rewards))"),
        ("rewards[t] +", "rewards[t - 1] +"),
        ("done[t]", "done[t - 1]"),
        ("rewards[t] + gamma", "gamma * rewards[t] + gamma"),
        ("bootstrap[-1]", "torch.zeros_like(rewards[0])"),
    ],
)
def test_the_tests_above_tell_slips_in_returns_apart(change, monkeypatch):
    monkeypatch.setitem(globals(), "compute_returns", slipped(compute_returns, *change))
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        test_returns_equal_the_sum_written_out()
    if change[0] in ("reversed(range(len(rewards)))", "rewards[t] +"):
        with pytest.raises(AssertionError):
            test_a_final_crash_is_charged_to_the_last_action()


@pytest.mark.parametrize(
    "change",
    [
        ("reversed(range(len(rewards)))", "range(len(rewards))"),
        ("delta[t] +", "delta[t - 1] +"),
        ("decay[t]", "decay[t - 1]"),
        ("(1 - terminated.to(rewards))", "(1 - done.to(rewards))"),
        ("(1 - done.to(rewards))", "(1 - terminated.to(rewards))"),
        (" * (1 - terminated.to(rewards))", ""),
        ("gamma * gae_lambda", "gae_lambda"),
        ("gamma * next_values", "next_values"),
    ],
)
def test_the_tests_above_tell_slips_in_gae_apart(change, monkeypatch):
    monkeypatch.setitem(globals(), "compute_gae", slipped(compute_gae, *change))
    for check in (
        test_gae_is_the_discounted_sum_of_td_errors,
        test_gae_is_a_mixture_of_n_step_advantages,
    ):
        with pytest.raises((AssertionError, BaseExceptionGroup)):
            check()


@quick
@given(rollouts())
def test_discounted_sums_run_over_each_episode_and_over_rollouts(rollout):
    rewards, carry, _, terminated, _, gamma, _ = rollout
    carry, expected = carry[0], torch.zeros_like(rewards)
    for t, n in itertools.product(*map(range, rewards.shape)):
        start = max((k + 1 for k in range(t) if terminated[k, n]), default=0)
        for k in range(start, t + 1):
            expected[t, n] += gamma ** (t - k) * rewards[k, n]
        if start == 0:
            expected[t, n] += gamma ** (t + 1) * carry[n]
    sums, rest = discounted_sums(rewards, terminated, carry, gamma)
    close(sums, expected)
    close(rest, torch.where(terminated[-1], 0, expected[-1]))
    half = len(rewards) // 2
    if half:  # two rollouts are one long one
        first, middle = discounted_sums(rewards[:half], terminated[:half], carry, gamma)
        second, end = discounted_sums(rewards[half:], terminated[half:], middle, gamma)
        assert torch.equal(torch.cat([first, second]), sums) and torch.equal(end, rest)


# ------------------------------------------------------------------------------------ the losses


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # clipped: this action is likely enough
        (0.5, 2.0, -1.0, -1.0),  # on the way back there is no clip
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, gradient):
    """Gradients are by the log-prob: the ratio times minus the advantage, or zero where clipped."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    actual, _, _ = ppo_policy_loss(new, old, torch.tensor([advantage], dtype=torch.float64), 0.2)
    actual.backward()
    close(actual.detach(), loss)
    close(new.grad, [gradient])


@quick
@given(st.integers(1, 20), st.floats(0.01, 0.5), st.integers(0, 2**32))
def test_policy_loss_equals_the_mean_written_out(size, clip_coef, seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, size, dtype=torch.float64, generator=generator)
    loss, kl, fraction = ppo_policy_loss(new, old, advantages, clip_coef)
    total, beyond, k3 = 0.0, 0, 0.0
    for a, b, advantage in zip(new.tolist(), old.tolist(), advantages.tolist()):
        ratio = math.exp(a - b)
        total += min(ratio * advantage, min(max(ratio, 1 - clip_coef), 1 + clip_coef) * advantage)
        beyond += abs(ratio - 1) > clip_coef
        k3 += ratio - 1 - math.log(ratio)
    close(loss, -total / size)
    close(fraction.double(), beyond / size, atol=1e-6)
    close(kl, k3 / size)
    assert kl >= 0


def test_k3_is_never_negative_where_k1_is():
    log_ratio = torch.tensor([0.1, -0.1, 0.3])
    _, kl, fraction = ppo_policy_loss(log_ratio, torch.zeros(3), torch.ones(3), 0.2)
    close(kl, 0.0200, atol=1e-4)
    close(fraction, 1 / 3)


def test_k3_estimates_the_divergence_of_old_from_new():
    old, new = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.2, 0.3]).log()
    counts = torch.tensor([7, 2, 1])  # actions as often as the old policy takes them
    actions = torch.arange(3).repeat_interleave(counts)
    _, kl, _ = ppo_policy_loss(new[actions], old[actions], torch.ones(10), 0.2)
    close(kl, (old.exp() * (old - new)).sum(), rtol=1e-5)


def test_diagnostics_carry_no_gradient():
    new = torch.zeros(3, requires_grad=True)
    _, kl, fraction = ppo_policy_loss(new, torch.ones(3), torch.ones(3), 0.2)
    assert not kl.requires_grad and not fraction.requires_grad


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    old, targets = torch.tensor([0.9, 0.0, 3.0]), torch.tensor([0.0, 0.0, 6.0])
    loss = value_loss(values, old, targets)
    loss.backward()
    close(loss.detach(), (1 + 4 + 9) / 6)
    close(values.grad, [1 / 3, 2 / 3, -1.0])


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # within the clip: as without
        (0.5, 0.0, 1.0, 0.32, 0.0),  # beyond it, towards the target: far enough
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # beyond it, away from the target: comes back
        (0.5, 0.0, -1.0, 1.125, 1.5),
        (-0.5, 0.0, -1.0, 0.32, 0.0),
    ],
)
def test_clipped_value_loss_by_hand(value, old, target, loss, gradient):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    actual = value_loss(values, column(old)[0], column(target)[0], 0.2)
    actual.backward()
    close(actual.detach(), loss)
    close(values.grad, [gradient])


@quick
@given(st.integers(1, 20), st.integers(0, 1000))
def test_normalized_advantages_have_mean_zero_and_deviation_one(size, seed):
    generator = torch.Generator().manual_seed(seed)
    advantages = 3 + 5 * torch.randn(size, dtype=torch.float64, generator=generator)
    mean = sum(advantages) / size
    deviation = math.sqrt(sum((advantage - mean) ** 2 for advantage in advantages) / size)
    close(normalize(advantages), (advantages - mean) / (deviation + 1e-8), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 2.0, 100.1, -1e6])
@pytest.mark.parametrize("size", [1, 3, 512])
def test_equal_advantages_become_zero(value, size):
    assert (normalize(torch.full((size,), value)) == 0).all()


# ------------------------------------------------------------------------------ policy and networks


def test_log_prob_and_entropy_are_those_of_a_categorical_with_gradient():
    logits = torch.randn(5, 3, 4, dtype=torch.float64).mul(3).requires_grad_()
    actions = torch.randint(4, (5, 3))
    log_probs, entropy = categorical_log_prob_and_entropy(logits, actions)
    categorical = torch.distributions.Categorical(logits=logits)
    close(log_probs, categorical.log_prob(actions))
    close(entropy, categorical.entropy())
    ours = torch.autograd.grad((log_probs + 2 * entropy).sum(), logits)[0]
    reference = (categorical.log_prob(actions) + 2 * categorical.entropy()).sum()
    close(ours, torch.autograd.grad(reference, logits)[0])


def test_log_prob_and_entropy_are_those_of_a_normal_with_gradient():
    """Summed over the dimensions of an action, never over time or batch."""
    mean, actions = torch.randn(2, 5, 3, 2, dtype=torch.float64)
    mean.requires_grad_()
    log_std = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    log_probs, entropy = gaussian_log_prob_and_entropy(mean, log_std, actions)
    assert log_probs.shape == entropy.shape == (5, 3)
    normal = torch.distributions.Normal(mean, log_std.exp())
    close(log_probs, normal.log_prob(actions).sum(-1))
    close(entropy, normal.entropy().sum(-1))
    ours = torch.autograd.grad((log_probs + 2 * entropy).sum(), [mean, log_std])
    reference = (normal.log_prob(actions).sum(-1) + 2 * normal.entropy().sum(-1)).sum()
    for own, other in zip(ours, torch.autograd.grad(reference, [mean, log_std])):
        close(own, other)
    standard = gaussian_log_prob_and_entropy(torch.zeros(2), torch.zeros(2), torch.tensor([3.0, 0]))
    close(standard[0], -6.3379, atol=1e-4)


def test_entropy_of_extreme_logits_is_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
    log_probs, entropy = categorical_log_prob_and_entropy(logits, torch.tensor([0, 1]))
    close(entropy, [0.0, math.log(3)], rtol=1e-6)
    close(log_probs, [0.0, -math.log(3)], rtol=1e-6)


@pytest.mark.parametrize("exploration", [0.0, 0.3, 1.0])
def test_exploring_mixes_the_policy_with_the_uniform_one(exploration):
    probs = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    uniform = torch.full((3,), -math.log(3), dtype=torch.float64)
    mixed = mixture_log_prob(probs.log(), uniform, exploration).exp()
    close(mixed, (1 - exploration) * probs + exploration / 3, rtol=1e-6)


def test_samples_are_drawn_with_the_probabilities_of_the_logits():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    draws, size = 100_000, 4
    actions = sample_categorical(
        logits.expand(draws, size), torch.empty(draws, size).exponential_()
    )
    shares = actions.bincount(minlength=4) / draws
    assert (shares - logits.softmax(-1)).abs().max() < 0.006  # four standard errors


def test_the_first_deviation_of_continuous_actions_is_an_option():
    args = Args(env_id="Pendulum-v1", hidden_sizes=(8,), log_std_init=-1.5)
    agent, obs = ppo.build_agent(args), torch.zeros(20_000, 3)
    assert agent.actor.log_std.requires_grad and agent.actor.log_std.tolist() == [-1.5]
    samples = agent.actor.sample(obs, agent.actor.noise(len(obs)))
    assert samples.std().item() == pytest.approx(np.exp(-1.5), rel=0.03)
    assert ppo.build_agent(Args(env_id="Pendulum-v1")).actor.log_std.tolist() == [0]


def test_equal_noise_takes_the_most_likely_action():
    logits = torch.randn(100, 4)
    assert torch.equal(sample_categorical(logits, torch.ones(100, 4)), logits.argmax(-1))


def box(*shape):
    return Box(-np.inf, np.inf, shape, np.float32)


def make_agent(obs_dim, actions, hidden_sizes=(8,), norm_obs=False):
    """actions is a space, or the number of discrete ones."""
    actions = Discrete(actions) if isinstance(actions, int) else actions
    return Agent(box(obs_dim), actions, hidden_sizes, norm_obs)


def last_layer(network):
    return network[-1]


def fixed_agent(logits, actions=None):
    """An agent whose policy ignores the observation; logits, or means of continuous actions."""
    agent = make_agent(1, actions or len(logits), ())
    with torch.no_grad():
        agent.actor.network[-1].weight.zero_()
        agent.actor.network[-1].bias.copy_(torch.as_tensor(logits))
    return agent


def test_act_is_greedy_or_sampled():
    torch.manual_seed(0)
    agent, obs = fixed_agent([1.0, 0.0]), np.zeros((4000, 1))
    greedy, sampled = ppo.act(agent, obs, True), ppo.act(agent, obs, False)
    assert greedy.shape == sampled.shape == (4000,)
    assert (greedy == 0).all() and abs((sampled == 0).mean() - 0.731) < 0.03


def test_every_head_of_a_multidiscrete_policy_has_its_own_softmax():
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, 2.0, 0.0, -1.0])
    agent, obs = fixed_agent(logits, MultiDiscrete([2, 3])), torch.zeros(40_000, 1)
    heads = [torch.distributions.Categorical(logits=part) for part in logits.split((2, 3))]
    with torch.no_grad():
        actions = agent.actor.sample(obs, agent.actor.noise(40_000))
        log_probs, entropy = agent.actor.log_prob_and_entropy(obs, actions)
    for column, head in zip(actions.T, heads):
        assert (column.bincount() / 40_000 - head.probs).abs().max() < 0.01
    close(log_probs, sum(h.log_prob(a) for h, a in zip(heads, actions.T)), rtol=1e-5, atol=1e-6)
    close(entropy, sum(h.entropy() for h in heads).expand(40_000), rtol=1e-5)
    assert ppo.act(agent, np.zeros((1, 1)), True).tolist() == [[0, 0]]
    assert agent.actor.uniform(5000).amax(0).tolist() == [1, 2]
    close(agent.actor.uniform_log_prob(actions), torch.full((40_000,), -math.log(6)), rtol=1e-6)


def test_a_gaussian_policy_has_its_mean_and_deviation():
    torch.manual_seed(0)
    agent, obs = fixed_agent([3.0, -1.0], box(2)), torch.zeros(40_000, 1)
    with torch.no_grad():
        agent.actor.log_std.copy_(torch.tensor([0.0, -1.0]))
        actions = agent.actor.sample(obs, agent.actor.noise(40_000))
        log_probs, entropy = agent.actor.log_prob_and_entropy(obs, actions)
    normal = torch.distributions.Normal(torch.tensor([3.0, -1.0]), torch.tensor([1, math.exp(-1)]))
    close(actions.mean(0), normal.mean, rtol=0, atol=0.03)
    close(actions.std(0), normal.stddev, rtol=0.02)
    close(log_probs, normal.log_prob(actions).sum(-1), rtol=1e-4, atol=1e-4)
    close(entropy, normal.entropy().sum().expand(40_000), rtol=1e-5)
    assert ppo.act(agent, np.zeros((1, 1)), True).tolist() == [[3, -1]]
    uniform = agent.actor.uniform(5000)
    assert uniform.min() < -0.99 and uniform.max() > 0.99 and uniform.abs().max() <= 1
    corners = torch.tensor([[-1.0, 1.0], [0.3, -1.1], [2.0, 0.0]])  # uniform is within [-1, 1]
    close(agent.actor.uniform_log_prob(corners), [-2 * math.log(2), -math.inf, -math.inf])


def test_a_new_policy_is_nearly_uniform():
    torch.manual_seed(0)
    agent = make_agent(8, 4, (64, 64))
    _, entropy = agent.actor.log_prob_and_entropy(torch.randn(1000, 8), torch.zeros(1000, 1).long())
    assert math.log(4) - 1e-3 < entropy.mean() <= math.log(4) + 1e-6
    assert agent.value(torch.randn(5, 3, 8)).shape == (5, 3)


def test_networks_of_vectors_have_tanh_between_orthogonal_layers():
    network = tanh_network(5, (7, 6), 3, 0.5)
    kinds = [type(layer) for layer in network]
    assert kinds == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    for layer, gain in zip(network[::2], (math.sqrt(2), math.sqrt(2), 0.5)):
        weight = layer.weight if len(layer.weight) <= len(layer.weight.T) else layer.weight.T
        close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5)
        assert (layer.bias == 0).all()


def image_agent():
    torch.manual_seed(0)
    return Agent(Box(0, 255, (4, 84, 84), np.uint8), Discrete(3), (), False)


def random_frames(size):
    return torch.randint(256, (size, 4, 84, 84), dtype=torch.uint8)


def test_pixels_are_scaled_once_for_acting_and_learning():
    """Frames of 255 reach the first convolution as 1, in acting as in learning."""
    agent, batch = image_agent(), image_batch(image_agent(), 2)
    seen = Seen(agent.encoder[1])
    batch.obs.fill_(255)
    ppo.act(agent, batch.obs.numpy(), True)
    update(agent, sgd(agent), batch, tiny_args())
    assert [images.unique().tolist() for images in seen.inputs] == [[1], [1]]


def test_the_encoder_of_images_is_the_network_of_mnih_2015():
    encoder, frames = image_agent().encoder, random_frames(2)
    hidden = frames / 255
    for layer, stride in zip((encoder[1], encoder[3], encoder[5]), (4, 2, 1)):
        hidden = nn.functional.conv2d(hidden, layer.weight, layer.bias, stride).relu()
    assert [list(encoder[i].weight.shape[:2]) for i in (1, 3, 5)] == [[32, 4], [64, 32], [64, 64]]
    hidden = nn.functional.linear(hidden.flatten(1), encoder[8].weight, encoder[8].bias).relu()
    assert hidden.shape == (2, 512)
    close(encoder(frames), hidden, rtol=1e-4, atol=1e-5)
    for i in (1, 3, 5, 8):
        weight = encoder[i].weight.flatten(1)
        close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-4)
        assert (encoder[i].bias == 0).all()


def image_batch(agent, size=4):
    """Random samples, with advantages and errors of the critic."""
    torch.manual_seed(1)
    obs, actions = random_frames(size), torch.randint(3, (size, 1))
    with torch.no_grad():
        features = agent.encoder(obs)
        log_probs, _ = agent.actor.log_prob_and_entropy(features, actions)
        values = agent.value(features)
    return Batch(obs, actions, log_probs, torch.randn(size), values, values + torch.randn(size))


@pytest.mark.parametrize("term", ["policy", "value", "entropy"])
def test_every_loss_of_images_reaches_the_encoder(term):
    """A value loss of weight vf_coef, together with the policy's, as written out here."""
    agent = image_agent()
    batch = image_batch(agent)
    if term != "policy":
        batch = batch._replace(advantages=torch.zeros(4))
    if term != "value":
        batch = batch._replace(targets=batch.values)
    args = tiny_args(
        norm_adv=False, max_grad_norm=1e9, vf_coef=0.3, ent_coef=0.2 if term == "entropy" else 0.0
    )
    features = agent.encoder(batch.obs)
    policy = torch.distributions.Categorical(logits=agent.actor.network(features))
    loss = {
        "policy": -((policy.log_prob(batch.actions[:, 0]) - batch.log_probs).exp()
                    * batch.advantages).mean(),
        "value": 0.3 * 0.5 * ((agent.critic(features)[:, 0] - batch.targets) ** 2).mean(),
        "entropy": -0.2 * policy.entropy().mean(),
    }[term]  # fmt: skip
    loss.backward()
    expected = agent.encoder[1].weight.grad.clone()
    assert expected.abs().max() > 1e-7
    update(agent, sgd(agent, 0.0), batch, args)
    close(agent.encoder[1].weight.grad, expected, rtol=1e-3, atol=1e-6)


def test_gradients_of_networks_that_share_an_encoder_are_clipped_together():
    agent = image_agent()
    batch, before = image_batch(agent), weights(agent)
    metrics = update(agent, sgd(agent), batch, tiny_args(max_grad_norm=1e-3))
    assert metrics["losses/agent_grad_norm"] > 1e-2 and "losses/actor_grad_norm" not in metrics
    assert (weights(agent) - before).norm() == pytest.approx(1e-3, rel=1e-2)


def test_what_the_policy_saw_while_collecting_is_what_is_learned_from(monkeypatch):
    """features are the encoder's of obs, step by step; final observations are encoded as well."""
    odd(monkeypatch, Box(0, 255, (64, 64, 3), np.uint8), Discrete(3))
    agent, args = image_agent(), tiny_args(env_id="Odd-v0", num_workers=0, gae_lambda=0.0)
    with contextlib.closing(start_envs(args, [1], 2)) as envs, torch.no_grad():
        rollout, _ = collect(agent, envs, 12, 0.0, "cpu")  # an episode is ten steps long
        batch = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
        features = agent.encoder(rollout.obs.flatten(0, 1)).unflatten(0, (13, 2))
        close(rollout.features, features, rtol=1e-4, atol=1e-5)
        values = agent.value(features)
        following = torch.where(
            rollout.done, agent.value(agent.encoder(rollout.final_obs.flatten(0, 1))).view(12, 2),
            values[1:],
        )  # fmt: skip
        log_probs, _ = agent.actor.log_prob_and_entropy(features[:-1], rollout.actions)
    assert rollout.done.sum() == 2
    close(batch.values, values[:-1].flatten(), rtol=1e-4, atol=1e-4)
    close(batch.log_probs, log_probs.flatten(), rtol=1e-4, atol=1e-5)
    expected = rollout.rewards + args.gamma * following - values[:-1]
    close(batch.advantages, expected.flatten(), rtol=1e-4, atol=1e-4)


def test_normalised_observations_are_those_of_the_statistics():
    torch.manual_seed(0)
    agent, obs = make_agent(2, 3, (), norm_obs=True), 5 + 3 * torch.randn(1000, 2)
    agent.encoder.update(obs)
    batch = Batch(obs, torch.zeros(1000, 1).long(), *torch.zeros(4, 1000))
    seen = [Seen(last_layer(network)) for network in (agent.actor.network, agent.critic)]
    update(agent, sgd(agent, 0.0), batch, tiny_args())
    ppo.act(agent, obs.numpy(), True)
    assert [len(own.inputs) for own in seen] == [2, 1]
    for inputs in (*seen[0].inputs, *seen[1].inputs):
        close(inputs.mean(0), torch.zeros(2), atol=1e-3)
        close(inputs.std(0), torch.ones(2), atol=1e-2)
    ppo.act(agent, obs.numpy() + 1e6, True)
    assert (seen[0].inputs[-1] == 10).all()
    kept = {name: value.clone() for name, value in agent.state_dict().items()}
    ppo.act(agent, obs.numpy(), True)
    assert all(torch.equal(value, kept[name]) for name, value in agent.state_dict().items())


@quick
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**32))
def test_running_statistics_are_those_of_all_samples_together(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [3 + 2 * torch.randn(n, 4, 2, generator=generator) for n in lengths]
    stats = RunningMeanStd((2,))
    for batch in batches:
        stats.update(batch)
    together = torch.cat(batches).reshape(-1, 2)
    close(stats.mean, together.mean(0), rtol=1e-3, atol=1e-3)
    close(stats.var, together.var(0, correction=0), rtol=1e-3, atol=1e-3)
    assert stats.count == pytest.approx(len(together), rel=1e-3)


def test_running_statistics_forget_their_start_and_are_saved():
    stats = RunningMeanStd()
    stats.update(torch.full((2, 3), 5.0))
    assert stats.mean == pytest.approx(5, rel=1e-3) and stats.var < 1e-3
    assert set(stats.state_dict()) == {"mean", "var", "count"}
    assert "return_stats.var" in make_agent(1, 2).state_dict()


# ------------------------------------------------------------------------------------- the update


def tiny_args(**options):
    small = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1}
    return Args(**{"env_id": "tests.probes:Count-v0", "hidden_sizes": (8,), **small, **options})


def tiny_batch(agent, size=32, obs_dim=3):
    """Random samples of the agent's own policy."""
    with torch.no_grad():
        obs = torch.randn(size, obs_dim)
        actions = torch.randint(3, (size, 1))
        log_probs, _ = agent.actor.log_prob_and_entropy(obs, actions)
        values = agent.value(obs)
    return Batch(obs, actions, log_probs, torch.randn(size), values, values + torch.randn(size))


def tiny_agent():
    torch.manual_seed(0)
    return make_agent(3, 3)


def sgd(agent, rate=1.0):
    return torch.optim.SGD(agent.parameters(), lr=rate)


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_one_step_follows_the_loss_written_out():
    """A minibatch of everything, without gradient clipping: the step is minus the gradient."""
    agent = tiny_agent()
    batch = tiny_batch(agent)
    # log-probs and values from before a change of weights, so that both clips have work to do
    batch = batch._replace(
        log_probs=batch.log_probs + 0.3 * torch.randn(32), values=batch.values + torch.randn(32)
    )
    for clip_value, norm_adv in itertools.product([False, True], repeat=2):
        args = tiny_args(
            ent_coef=0.1, max_grad_norm=1e9, clip_value=clip_value, norm_adv=norm_adv,
            clip_coef=0.15,
        )  # fmt: skip
        agent.zero_grad()
        policy = torch.distributions.Categorical(logits=agent.actor.network(batch.obs))
        advantages = batch.advantages
        if norm_adv:
            advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        ratio = (policy.log_prob(batch.actions[:, 0]) - batch.log_probs).exp()
        worse = torch.min(ratio * advantages, ratio.clamp(0.85, 1.15) * advantages)
        values = agent.critic(batch.obs)[:, 0]
        errors = (values - batch.targets) ** 2
        if clip_value:
            near = batch.values + (values - batch.values).clamp(-0.15, 0.15)
            errors = torch.max(errors, (near - batch.targets) ** 2)
        loss = -worse.mean() - 0.1 * policy.entropy().mean() + 0.5 * errors.mean()
        loss.backward()
        expected = weights(agent) - torch.cat([p.grad.flatten() for p in agent.parameters()])
        before = agent.state_dict()
        before = {name: value.clone() for name, value in before.items()}
        metrics = update(agent, sgd(agent), batch, args)
        close(weights(agent), expected, rtol=1e-5, atol=1e-6)
        agent.load_state_dict(before)
        named = {
            "policy_loss": -worse.mean(), "value_loss": 0.5 * errors.mean(),
            "entropy": policy.entropy().mean(), "approx_kl": (ratio - 1 - ratio.log()).mean(),
            "clipfrac": ((ratio - 1).abs() > 0.15).float().mean(),
            "explained_variance": 1 - (batch.targets - batch.values).var() / batch.targets.var(),
        }  # fmt: skip
        for name, value in named.items():
            assert metrics[f"losses/{name}"] == pytest.approx(value.item(), abs=1e-5), name


def test_policy_loss_does_not_reach_the_critic_nor_value_loss_the_actor():
    args = tiny_args(ent_coef=0.0)
    for moves, stays in (("actor", "critic"), ("critic", "actor")):
        agent = tiny_agent()
        batch = tiny_batch(agent)
        if moves == "actor":
            batch = batch._replace(targets=batch.values)
        else:
            batch = batch._replace(advantages=torch.zeros(32))
        before = {name: weights(getattr(agent, name)) for name in (moves, stays)}
        update(agent, sgd(agent), batch, args)
        assert not torch.equal(weights(getattr(agent, moves)), before[moves])
        # the critic's output for one batch and for another split may differ in the last bit
        close(weights(getattr(agent, stays)), before[stays], rtol=0, atol=1e-6)


def test_good_actions_become_likelier_and_values_approach_their_targets():
    agent = tiny_agent()
    batch = tiny_batch(agent)
    update(agent, sgd(agent, 0.1), batch, tiny_args(ent_coef=0.0, max_grad_norm=1e9))
    with torch.no_grad():
        log_probs, _ = agent.actor.log_prob_and_entropy(batch.obs, batch.actions)
        assert ((log_probs - batch.log_probs) * normalize(batch.advantages)).sum() > 0
        errors = (agent.value(batch.obs) - batch.targets) ** 2
        assert errors.mean() < ((batch.values - batch.targets) ** 2).mean()


@pytest.mark.parametrize("ent_coef", [0.0, 0.1])
def test_the_entropy_bonus_alone_raises_entropy(ent_coef):
    agent = tiny_agent()
    with torch.no_grad():
        agent.actor.network[-1].bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    batch = tiny_batch(agent)._replace(advantages=torch.zeros(32))
    before = agent.actor.log_prob_and_entropy(batch.obs, batch.actions)[1].mean()
    update(agent, sgd(agent), batch, tiny_args(ent_coef=ent_coef))
    after = agent.actor.log_prob_and_entropy(batch.obs, batch.actions)[1].mean()
    assert (after > before + 1e-3) == (ent_coef > 0)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_gradients_are_clipped_by_norm_for_each_network(scale):
    """The critic's large errors must not shrink the actor's step."""
    agent = tiny_agent()
    batch = tiny_batch(agent)
    batch = batch._replace(targets=batch.values + scale * torch.randn(32))
    before = weights(agent.actor), weights(agent.critic)
    metrics = update(agent, sgd(agent), batch, tiny_args(max_grad_norm=1e-3))
    moved = (weights(agent.actor) - before[0]).norm(), (weights(agent.critic) - before[1]).norm()
    assert moved[0] == pytest.approx(1e-3, rel=1e-2)
    assert moved[1] == pytest.approx(min(1e-3, metrics["losses/critic_grad_norm"]), rel=0.05)
    assert metrics["losses/actor_grad_norm"] > 1e-2, "the norm before clipping is what is logged"


class Seen:
    """Notes what a network is given, call by call."""

    def __init__(self, network):
        self.inputs = []
        network.register_forward_pre_hook(lambda _, inputs: self.inputs.append(inputs[0]))

    def sizes(self):
        return [len(rows) for rows in self.inputs]


@pytest.mark.parametrize(("size", "num_minibatches"), [(32, 4), (33, 4), (7, 7), (10, 3), (5, 1)])
def test_minibatches_hold_every_sample_once_per_epoch(size, num_minibatches):
    agent = tiny_agent()
    batch = tiny_batch(agent, size)
    batch.obs[:, 0] = torch.arange(size)
    actor, critic = Seen(agent.actor.network), Seen(agent.critic)
    args = tiny_args(num_minibatches=num_minibatches, update_epochs=3)
    update(agent, sgd(agent, 1e-6), batch, args)
    assert len(actor.inputs) == 3 * num_minibatches
    assert max(actor.sizes()) - min(actor.sizes()) <= 1 and min(actor.sizes()) >= 1
    assert all(map(torch.equal, actor.inputs, critic.inputs))
    epochs = [
        torch.cat(actor.inputs[i : i + num_minibatches])[:, 0].tolist()
        for i in range(0, len(actor.inputs), num_minibatches)
    ]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(size)), "every epoch is shuffled anew"


def test_metrics_are_means_over_all_minibatches():
    """Without a learning rate every epoch sees the losses whose mean is the whole batch's."""
    agent = tiny_agent()
    batch, still = tiny_batch(agent), sgd(agent, 0.0)
    whole = update(agent, still, batch, tiny_args(norm_adv=False))
    parts = update(
        agent, still, batch, tiny_args(norm_adv=False, num_minibatches=4, update_epochs=2)
    )
    for name in ("policy_loss", "value_loss", "entropy", "explained_variance"):
        assert parts[f"losses/{name}"] == pytest.approx(whole[f"losses/{name}"], abs=1e-5)


def test_the_ratio_is_one_at_first_and_then_moves():
    args = tiny_args(env_id="CartPole-v1", num_workers=0, num_steps=16)
    torch.manual_seed(0)
    agent = make_agent(4, 2)
    with contextlib.closing(start_envs(args, [1], 4)) as envs:
        rollout, _ = collect(agent, envs, 16, 0.0, "cpu")
    batch = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
    log_probs, _ = agent.actor.log_prob_and_entropy(batch.obs, batch.actions)
    close((log_probs - batch.log_probs).exp(), torch.ones(64), atol=1e-5)
    first = update(agent, sgd(agent, 0.5), batch, args)
    assert first["losses/clipfrac"] == 0 and abs(first["losses/approx_kl"]) < 1e-7
    assert abs(first["losses/policy_loss"]) < 1e-6, "minus the mean of normalised advantages"
    second = update(agent, sgd(agent, 0.5), batch, args)
    assert second["losses/approx_kl"] > 1e-6


@pytest.mark.parametrize(("target_kl", "epochs"), [(None, 5), (1e-4, 1), (1e9, 5)])
def test_target_kl_ends_the_whole_update(target_kl, epochs):
    agent = tiny_agent()
    batch, seen = tiny_batch(agent), Seen(agent.actor.network)
    args = tiny_args(target_kl=target_kl, num_minibatches=4, update_epochs=5)
    update(agent, sgd(agent), batch, args)
    assert len(seen.inputs) == 4 * epochs


def test_target_kl_looks_at_the_last_epoch():
    """The mean over all epochs would notice a policy that ran away too late."""
    agent, kls = tiny_agent(), []
    batch, seen = tiny_batch(agent), Seen(agent.actor.network)
    args = tiny_args(num_minibatches=2, update_epochs=6, ent_coef=0.0)
    seen.inputs.clear()
    state = {name: value.clone() for name, value in agent.state_dict().items()}
    for epochs in range(1, 7):
        agent.load_state_dict(state)
        torch.manual_seed(1)
        metrics = update(agent, sgd(agent, 0.3), batch, replace(args, update_epochs=epochs))
        kls.append(metrics["losses/approx_kl"] * epochs)
    of_each_epoch = np.diff([0, *kls])
    limit = float(of_each_epoch[3] + of_each_epoch[2]) / 2
    assert of_each_epoch[:3].max() < limit < of_each_epoch[3], "the case is of the kind wanted"
    agent.load_state_dict(state)
    seen.inputs.clear()
    torch.manual_seed(1)
    update(agent, sgd(agent, 0.3), batch, replace(args, target_kl=limit))
    assert len(seen.inputs) == 2 * 4


@pytest.mark.parametrize("field", ["advantages", "targets", "log_probs"])
def test_a_loss_that_is_not_finite_stops_the_update_by_name(field):
    agent = tiny_agent()
    batch = tiny_batch(agent)
    getattr(batch, field)[3] = math.nan
    with pytest.raises(TrainingError, match="non-finite"):
        update(agent, sgd(agent), batch, tiny_args())


def test_nothing_to_explain_gives_no_warning():
    agent = tiny_agent()
    batch = tiny_batch(agent)._replace(targets=torch.ones(32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = update(agent, sgd(agent), batch, tiny_args())
    assert not math.isfinite(metrics["losses/explained_variance"])


# ------------------------------------------------------------------------------- rollout and batch


def counting_agent():
    """V(obs) = obs, and a policy that takes action 1 the more often the larger obs is."""
    agent = make_agent(1, 2, ())
    with torch.no_grad():
        agent.critic[0].weight.fill_(1.0)
        agent.actor.network[0].weight.copy_(torch.tensor([[0.0], [1.0]]))
    return agent


def counted(env_id, num_steps=7, num_workers=0, **options):
    """Rollout and batch of two environments that count their steps, [T] of the first one."""
    args = tiny_args(env_id=env_id, num_workers=num_workers, gamma=1.0, gae_lambda=1.0, **options)
    agent = counting_agent()
    with contextlib.closing(start_envs(args, [1], 2)) as envs:
        rollout, episodes = collect(agent, envs, num_steps, 0.0, "cpu")
    batch = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
    fields = {name: getattr(batch, name).reshape(num_steps, 2) for name in
              ("log_probs", "advantages", "values", "targets", "actions")}  # fmt: skip
    return rollout, SimpleNamespace(**fields), episodes


def test_a_rollout_of_episodes_that_terminate():
    rollout, batch, episodes = counted("tests.probes:Count-v0")
    for column in range(2):
        assert rollout.obs[:, column, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        assert rollout.final_obs[:, column, 0].tolist() == [0, 0, 3, 0, 0, 3, 0]
        assert rollout.terminated[:, column].tolist() == [False, False, True] * 2 + [False]
        assert rollout.done[:, column].tolist() == [False, False, True] * 2 + [False]
        assert batch.values[:, column].tolist() == [0, 1, 2, 0, 1, 2, 0]
        # three rewards to come minus V; the cut tail has one reward and V(1)
        assert batch.advantages[:, column].tolist() == [3, 1, -1, 3, 1, -1, 2]
        assert batch.targets[:, column].tolist() == [3, 2, 1, 3, 2, 1, 2]
    assert (rollout.rewards == 1).all()
    assert episodes == [(3.0, 3)] * 4


@pytest.mark.parametrize("value_target", ["gae", "returns"])
def test_a_time_limit_bootstraps_from_the_final_observation(value_target):
    """V(final) is 3; the state before it is worth 2, the next episode's first one 0."""
    rollout, batch, episodes = counted("tests.probes:CountTimeLimit-v0", value_target=value_target)
    for column in range(2):
        assert not rollout.terminated.any()
        assert rollout.done[:, column].tolist() == [False, False, True] * 2 + [False]
        assert batch.advantages[:, column].tolist() == [6, 4, 2, 6, 4, 2, 2]
        assert batch.targets[:, column].tolist() == [6, 5, 4, 6, 5, 4, 2]
    assert episodes == [(3.0, 3)] * 4


@pytest.mark.parametrize("value_target", ["gae", "returns"])
def test_targets_of_terminated_episodes(value_target):
    _, batch, _ = counted("tests.probes:Count-v0", value_target=value_target)
    assert batch.targets[:, 0].tolist() == [3, 2, 1, 3, 2, 1, 2]


def test_targets_differ_where_lambda_is_below_one():
    args = tiny_args(env_id="tests.probes:Count-v0", num_workers=0, gamma=1.0, gae_lambda=0.0)
    agent = counting_agent()
    with contextlib.closing(start_envs(args, [1], 2)) as envs:
        rollout, _ = collect(agent, envs, 3, 0.0, "cpu")
    by_gae = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
    args = replace(args, value_target="returns")
    by_returns = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
    assert by_gae.targets[::2].tolist() == [2, 3, 1]  # reward + V(next)
    assert by_returns.targets[::2].tolist() == [3, 2, 1]
    assert by_gae.advantages.tolist() == by_returns.advantages.tolist()


def test_log_probs_belong_to_the_actions_taken():
    rollout, batch, _ = counted("tests.probes:Count-v0")
    odds = torch.stack([torch.zeros_like(rollout.obs[:-1, :, 0]), rollout.obs[:-1, :, 0]], -1)
    expected = torch.distributions.Categorical(logits=odds).log_prob(rollout.actions[..., 0])
    close(batch.log_probs, expected, rtol=1e-5)
    assert torch.equal(batch.actions, rollout.actions[..., 0])


def test_actions_and_rewards_belong_to_the_same_step():
    args = tiny_args(env_id="tests.probes:ObsAction-v0", num_workers=2)
    torch.manual_seed(0)
    with contextlib.closing(start_envs(args, [1], 6)) as envs:
        rollout, _ = collect(make_agent(1, 2), envs, 50, 0.0, "cpu")
    right = (rollout.actions[..., 0] == 1) == (rollout.obs[:-1, :, 0] > 0)
    assert torch.equal(rollout.rewards, 2 * right.float() - 1)
    assert 0.3 < right.float().mean() < 0.7


def test_the_policy_is_sampled_while_collecting():
    args = tiny_args(num_workers=0)
    torch.manual_seed(0)
    with contextlib.closing(start_envs(args, [1], 4)) as envs:
        rollout, _ = collect(fixed_agent([1.0, 0.0]), envs, 1000, 0.0, "cpu")
    assert abs((rollout.actions == 0).float().mean() - 0.731) < 0.03


def test_a_second_rollout_goes_on_where_the_first_ended():
    args = tiny_args(num_workers=0)
    with contextlib.closing(start_envs(args, [1], 2)) as envs:
        first, _ = collect(counting_agent(), envs, 4, 0.0, "cpu")
        second, episodes = collect(counting_agent(), envs, 4, 0.0, "cpu")
    assert first.obs[:, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert second.obs[:, 0, 0].tolist() == [1, 2, 0, 1, 2]
    assert first.obs[0, 0, 0] == 0, "the first rollout is not overwritten"
    assert episodes == [(3.0, 3)] * 2


@pytest.mark.parametrize(("probe", "name"), [("NaNReward", "reward"), ("NaNObs", "observation")])
def test_a_value_that_is_not_finite_stops_the_rollout_by_name(probe, name):
    args = tiny_args(env_id=f"tests.probes:{probe}-v0", num_workers=0)
    with contextlib.closing(start_envs(args, [1], 2)) as envs:
        collect(counting_agent(), envs, 4, 0.0, "cpu")
        with pytest.raises(TrainingError, match=f"non-finite {name} from environment 0"):
            collect(counting_agent(), envs, 4, 0.0, "cpu")


def test_a_final_observation_that_is_not_finite_stops_the_rollout_by_name():
    """The next episode's first observation takes its place in everything else."""

    class LastNaN(tests.probes.Count):
        def step(self, action):
            obs, reward, terminated, *rest = super().step(action)
            return obs * (np.nan if terminated else 1), reward, terminated, *rest

    with (
        contextlib.closing(ppo.VectorEnv(LastNaN, [1])) as envs,
        pytest.raises(TrainingError, match="non-finite observation from environment 0"),
    ):
        collect(counting_agent(), envs, 4, 0.0, "cpu")


# ------------------------------------------------------------------------------------ environments


class Odd(gym.Env):
    """Any spaces; the observation is a sample, the reward the sum of the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None, observation_space=None, action_space=None):
        self.render_mode = render_mode
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


gym.register("Odd-v0", Odd, max_episode_steps=10)


def odd(monkeypatch, observation_space, action_space):
    kwargs = {"observation_space": observation_space, "action_space": action_space}
    monkeypatch.setattr(gym.spec("Odd-v0"), "kwargs", kwargs)
    return ppo.make_env("Odd-v0")


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (Discrete(5), 5),
        (Box(-1, 1, (2, 3), np.float32), 6),
        (Box(-1, 1, (3,), np.float64), 3),
        (Box(0, 9, (3,), np.int64), 3),
        (Dict({"a": Discrete(2), "b": Box(-1, 1, (2,), np.float32)}), 4),
        (Tuple([Discrete(2), Discrete(3)]), 5),
    ],
)
def test_observations_that_are_no_vector_are_flattened(monkeypatch, space, size, tmp_path):
    assert odd(monkeypatch, space, Discrete(2)).observation_space.shape == (size,)
    summary, _, _ = run(tmp_path, env_id="Odd-v0", total_timesteps=32)
    assert summary["global_step"] == 32


def test_actions_that_start_elsewhere_are_shifted(monkeypatch):
    env = odd(monkeypatch, box(1), Discrete(3, start=-1))
    env.reset(seed=0)
    assert [env.step(action)[1] for action in range(3)] == [-1, 0, 1]
    assert env.action_space.n == 3 and env.action_space.start == 0
    env = odd(monkeypatch, box(1), MultiDiscrete([2, 3], start=[5, -1]))
    env.reset(seed=0)
    assert [env.step(np.array(action))[1] for action in ([0, 0], [1, 0], [1, 2])] == [4, 5, 7]


def test_continuous_actions_are_rescaled_and_clipped(monkeypatch):
    env = odd(monkeypatch, box(1), Box(np.float32([0, -2]), np.float32([10, 2])))
    env.reset(seed=0)
    actions = ([-1, -1], [1, 1], [0, 0], [0.5, 0], [3, -7])
    assert [env.step(np.float32(action))[1] for action in actions] == [-2, 12, 5, 7.5, 8]
    env = odd(monkeypatch, box(1), box(2))
    env.reset(seed=0)
    assert env.step(np.float32([30, -7]))[1] == 23, "without bounds there is nothing to clip to"


def test_continuous_actions_are_stored_and_scored_as_drawn(monkeypatch):
    """The policy's mean of 3 is beyond the bound, which only the environment is shown."""
    odd(monkeypatch, box(1), Box(-1, 1, (2,), np.float32))
    torch.manual_seed(0)
    agent = fixed_agent([3.0, 3.0], Box(-1, 1, (2,), np.float32))
    with torch.no_grad():
        agent.actor.log_std.fill_(-2.0)
    args = tiny_args(env_id="Odd-v0", num_workers=1, num_steps=50)
    with contextlib.closing(start_envs(args, [1], 2)) as envs:
        rollout, _ = collect(agent, envs, 50, 0.0, "cpu")
    assert (rollout.rewards == 2).all()
    close(rollout.actions.mean((0, 1)), [3.0, 3.0], rtol=0.03)
    batch = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
    normal = torch.distributions.Normal(3.0, math.exp(-2))
    close(batch.log_probs, normal.log_prob(batch.actions).sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "space",
    [Discrete(3, start=2), MultiDiscrete([2, 3]), Box(0, 5, (2,), np.float32), box(1)],
)
def test_every_kind_of_actions_trains(monkeypatch, tmp_path, space):
    odd(monkeypatch, box(2), space)
    _, state, rows = run(tmp_path, env_id="Odd-v0", num_workers=2)
    assert all(value.isfinite().all() for value in state["agent"].values())
    assert rows[-1]["losses/actor_grad_norm"] > 0


def test_images_train_and_stay_bytes_in_storage(monkeypatch, tmp_path):
    odd(monkeypatch, Box(0, 255, (64, 64, 3), np.uint8), Discrete(2))
    args = tiny_args(env_id="Odd-v0", num_workers=0)
    with contextlib.closing(start_envs(args, [1], 2)) as envs:
        assert envs.obs.shape == (2, 4, 84, 84)
        assert envs.obs.dtype == envs.final_obs.dtype == np.uint8
        assert ppo.collect(ppo.build_agent(args), envs, 2, 0.0, "cpu")[0].obs.dtype == torch.uint8
    options = {"total_timesteps": 8, "num_envs": 2, "num_steps": 4, "update_epochs": 1}
    torch.manual_seed(1)
    new = ppo.build_agent(args).state_dict()
    _, state, _ = run(tmp_path, env_id="Odd-v0", eval_episodes=1, seed=1, **options)
    for layer in ("encoder.1", "encoder.8", "actor.network.0", "critic.0"):
        name = f"{layer}.weight"
        change = (state["agent"][name] - new[name]).abs().max()
        assert 1e-5 < change < 0.05, f"{name}: trained, from the weights of its seed"


class Lives(tests.probes.Count):
    """Nine steps, every third one costs one of three lives."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"lives": 3 - self.t // 3}


gym.register("Lives-v0", Lives, kwargs={"length": 9})


def test_the_loss_of_a_life_ends_credit_but_not_the_episode():
    args = tiny_args(env_id="Lives-v0", num_workers=0, gamma=1.0, gae_lambda=1.0)
    agent = counting_agent()
    with contextlib.closing(start_envs(args, [1], 1)) as envs:
        rollout, episodes = collect(agent, envs, 12, 0.0, "cpu")
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]
    assert rollout.terminated[:, 0].tolist() == [False, False, True] * 4
    assert rollout.done[:, 0].tolist() == [False, False, True] * 4
    assert episodes == [(9.0, 9)]
    batch = prepare_batch(agent, rollout, rollout.rewards, 0.0, args)
    assert batch.targets.tolist() == [3, 2, 1] * 4


@pytest.mark.parametrize("space", [MultiBinary(3), Dict({"a": Discrete(2)})])
def test_other_actions_are_refused_by_name(monkeypatch, space):
    with pytest.raises(UsageError, match=type(space).__name__):
        odd(monkeypatch, Box(-1, 1, (1,), np.float32), space)


# --------------------------------------------------------------------------------------- whole runs


def run(tmp_path, **options):
    """Trains with tiny settings; the summary, the last checkpoint and the rows of metrics."""
    small = {
        "total_timesteps": 128, "num_envs": 4, "num_steps": 8, "num_minibatches": 2,
        "update_epochs": 2, "hidden_sizes": (8,), "num_workers": 0, "eval_episodes": 4,
        "wandb_mode": "disabled", "runs_dir": str(tmp_path), "save_every": 1,
    }  # fmt: skip
    summary = train(Args(**{"env_id": "tests.probes:BestAction-v0", **small, **options}))
    return summary, *files(tmp_path)


def files(tmp_path):
    folder = next(path.parent for path in tmp_path.glob("*/args.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["charts/SPS"]
    return torch.load(folder / "last.pt", weights_only=True), rows


def flat(value):
    """Every number and tensor in nested dicts and lists, but the clock's."""
    if isinstance(value, dict):
        skipped = ("seconds", "solved_seconds", "wandb_id", "args")
        return [item for key in value if key not in skipped for item in flat(value[key])]
    if isinstance(value, list | tuple):
        return [item for part in value for item in flat(part)]
    return [value]


def same(left, right):
    """Whether two checkpoints are equal bit for bit."""
    left, right = flat(left), flat(right)
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right)
    )


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"), env_id="CartPole-v1", total_timesteps=512)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_a_seed_repeats_a_run_bit_for_bit_with_any_number_of_workers(
    tmp_path, cartpole, num_workers
):
    _, state, rows = run(
        tmp_path, env_id="CartPole-v1", total_timesteps=512, num_workers=num_workers
    )
    assert same(state, cartpole[1]) and rows == cartpole[2]


def test_another_seed_gives_another_run(tmp_path, cartpole):
    _, state, rows = run(tmp_path, env_id="CartPole-v1", total_timesteps=512, seed=2)
    assert rows != cartpole[2]
    for name, value in state["agent"].items():
        if name.endswith("weight"):
            assert not torch.equal(value, cartpole[1]["agent"][name])


def test_learning_rates_fall_linearly_to_a_last_one_above_zero(tmp_path):
    _, state, rows = run(tmp_path, actor_lr=4.0e-3, critic_lr=8e-3)
    rates = [row["charts/learning_rate"] for row in rows]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    groups = state["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 2e-3])
    assert [group["eps"] for group in groups] == [1e-5, 1e-5]


def test_learning_rates_stay_without_annealing_and_one_option_sets_both(tmp_path):
    _, state, rows = run(tmp_path, learning_rate=3e-3, anneal_lr=False)
    assert [row["charts/learning_rate"] for row in rows] == [3e-3] * 4
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [3e-3, 3e-3]


@pytest.mark.parametrize(("steps", "updates"), [(1, 1), (32, 1), (33, 2), (100, 4)])
def test_steps_are_rounded_up_to_whole_iterations(tmp_path, steps, updates):
    summary, _, rows = run(tmp_path, total_timesteps=steps, save_every=1000)
    assert summary["global_step"] == 32 * updates
    assert [row["global_step"] for row in rows] == [32 * (i + 1) for i in range(updates)]
    assert rows[-1]["charts/learning_rate"] == pytest.approx(2.5e-3 / updates)


@pytest.mark.parametrize("options", [{"num_envs": 1, "num_steps": 1}, {"num_minibatches": 32}])
def test_minibatches_of_one_sample_stay_finite(tmp_path, options):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*degrees of freedom.*")
        options = {"num_minibatches": 1, "total_timesteps": 4, **options}
        _, state, _ = run(tmp_path, env_id="CartPole-v1", **options)
    assert all(value.isfinite().all() for value in state["agent"].values())


@pytest.mark.parametrize("num_steps", [1, 9])
def test_rewards_are_scaled_but_reported_raw(tmp_path, num_steps):
    """Count pays 3 per episode; its discounted sums 1, 1.5, 1.75 spread by 0.312."""
    options = {"num_steps": num_steps, "total_timesteps": 120, "gamma": 0.5}
    summary, state, rows = run(tmp_path, env_id="tests.probes:Count-v0", **options)
    assert rows[-1]["charts/episodic_return"] == 3 and rows[-1]["charts/return_mean_100"] == 3
    assert rows[-1]["charts/episodic_length"] == 3
    assert (summary["eval_return_mean"], summary["eval_return_std"]) == (3, 0)
    deviation = state["agent"]["return_stats.var"].sqrt()
    close(deviation, 0.31180, rtol=0.02)
    assert state["agent"]["return_stats.count"] == pytest.approx(len(rows) * 4 * num_steps)


def test_the_first_update_already_sees_scaled_rewards(tmp_path):
    """The same environment with rewards times 1000 gives the same networks."""
    _, one, _ = run(tmp_path / "1", env_id="CountScaled-v0", total_timesteps=64)
    _, other, _ = run(tmp_path / "2", env_id="CountScaled1000-v0", total_timesteps=64)
    raw_options = {"env_id": "CountScaled1000-v0", "total_timesteps": 64, "norm_reward": False}
    _, raw, _ = run(tmp_path / "3", **raw_options)
    for name in one["agent"]:
        if name.startswith(("actor", "critic")):
            close(one["agent"][name], other["agent"][name], rtol=1e-3, atol=1e-4)
    assert not same(raw["agent"], other["agent"])
    assert raw["agent"]["return_stats.count"] < 1, "nothing is counted without normalisation"


class CountScaled(tests.probes.Count):
    """Rewards of 1, 2, 3, times a factor."""

    def __init__(self, scale=1.0, **options):
        super().__init__(**options)
        self.scale = scale

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward * self.t * self.scale, *rest


gym.register("CountScaled-v0", CountScaled)
gym.register("CountScaled1000-v0", CountScaled, kwargs={"scale": 1000.0})


def test_scaled_rewards_are_bounded(tmp_path):
    """A constant reward has no spread to divide by; V = 0 and a target of 10 cost 50."""
    options = {"learning_rate": 0.0, "gae_lambda": 0.0}
    _, _, rows = run(tmp_path, env_id="tests.probes:ConstantValue-v0", **options)
    assert all(30 < row["losses/value_loss"] < 70 for row in rows)


def test_clipped_rewards_are_signs_and_reported_raw(tmp_path):
    options = {"clip_reward": True, "norm_reward": False, "total_timesteps": 64}
    _, one, _ = run(tmp_path / "1", env_id="CountScaled-v0", **options)
    summary, other, _ = run(tmp_path / "2", env_id="CountScaled1000-v0", **options)
    assert same(one["agent"], other["agent"])
    assert summary["eval_return_mean"] == 6000 and summary["return_mean_100"] == 6000


def test_observation_statistics_move_after_the_update_and_count_every_step(tmp_path):
    """Without a learning rate the policy must be the same one before and after: KL 0."""
    options = {"env_id": "CartPole-v1", "norm_obs": True}
    _, state, rows = run(tmp_path / "still", learning_rate=0.0, **options)
    assert state["agent"]["encoder.count"] == pytest.approx(128, abs=0.01)
    assert all(abs(row["losses/approx_kl"]) < 1e-7 for row in rows)
    _, moved, _ = run(tmp_path / "moving", **options)
    assert same(state["agent"]["encoder.count"], moved["agent"]["encoder.count"])


def test_exploring_takes_uniform_actions_and_scores_them_as_a_mixture():
    torch.manual_seed(0)
    agent, args = fixed_agent([1.0, 0.0, 0.0]), tiny_args(env_id="tests.probes:Count-v0")
    with contextlib.closing(start_envs(replace(args, num_workers=0), [1], 4)) as envs:
        rollout, _ = collect(agent, envs, 2000, 0.5, "cpu")
    probs = 0.5 * torch.tensor([1.0, 0.0, 0.0]).softmax(-1) + 0.5 / 3
    shares = rollout.actions.flatten().bincount() / 8000
    assert (shares - probs).abs().max() < 0.025
    batch = prepare_batch(agent, rollout, rollout.rewards, 0.5, args)
    close(batch.log_probs, probs.log()[batch.actions[:, 0]], rtol=1e-4)


def test_exploring_falls_linearly_to_nothing(monkeypatch, tmp_path):
    """A policy that stays N(0, 1) differs from what was played by as much as was explored."""
    odd(monkeypatch, box(1), Box(-1, 1, (1,), np.float32))
    options = {"learning_rate": 0.0, "exploration_start": 0.8, "exploration_fraction": 0.5}
    _, _, rows = run(tmp_path, env_id="Odd-v0", num_steps=200, total_timesteps=3200, **options)
    kls = [row["losses/approx_kl"] for row in rows]
    assert kls[0] > 2 * kls[1] > 0.001 and max(map(abs, kls[2:])) < 1e-7


class Interrupting(tests.probes.BestAction):
    """The first of them to make 45 steps (of 8 an iteration, so in the 6th) sends a signal."""

    steps, sent = 0, False

    def step(self, action):
        self.steps += 1
        if self.steps == 45 and not Interrupting.sent:
            Interrupting.sent = True
            signal.raise_signal(signal.SIGTERM)
        return super().step(action)


gym.register("Interrupting-v0", Interrupting)


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path):
    """Where episodes hold no state, everything else must come back: weights, Adam, rates, RNG."""
    options = {"total_timesteps": 256, "ent_coef": 0.05}
    _, whole, whole_rows = run(tmp_path / "whole", **options)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "parts", env_id="Interrupting-v0", **options)
    assert stop.value.code == 128 + signal.SIGTERM
    stopped, rows = files(tmp_path / "parts")
    assert stopped["progress"]["global_step"] == 6 * 32 and len(rows) == 6
    assert whole["progress"]["global_step"] == 8 * 32
    checkpoint = next((tmp_path / "parts").glob("*/last.pt"))
    _, resumed, rows = run(
        tmp_path / "parts", env_id="Interrupting-v0", resume=str(checkpoint), **options
    )
    assert same(resumed, whole) and rows == whole_rows


def test_evaluation_leaves_the_agent_as_it_was_and_counts_raw_returns():
    args = tiny_args(env_id="tests.probes:CountTimeLimit-v0", num_workers=0, num_envs=4)
    agent = counting_agent()
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    returns, lengths = ppo.evaluate(agent, args, 6)
    assert returns.tolist() == [3] * 6 and lengths.tolist() == [3] * 6
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())


class Lopsided(tests.probes.Probe):
    """Episodes last 1 step or 50, as the first observation says; they return their length."""

    def first_obs(self):
        self.t, self.length = 0, 50 if self.random_sign() > 0 else 1
        return float(self.length > 1)

    def step(self, action):
        self.t += 1
        return np.array([self.obs], np.float32), 1.0, self.t == self.length, False, {}


gym.register("Lopsided-v0", Lopsided)


def test_evaluation_does_not_favour_short_episodes():
    """The first 400 episodes to end would be short ones: a mean far below 25.5."""
    args = tiny_args(env_id="Lopsided-v0", num_workers=0, num_envs=100)
    returns, lengths = ppo.evaluate(counting_agent(), args, 400)
    assert len(returns) == 400 and np.array_equal(returns, lengths)
    assert abs(returns.mean() - 25.5) < 5
    assert set(returns) == {1, 50}


class Seeded(tests.probes.BestAction):
    """Notes the seeds that it is reset with."""

    seeds = []

    def reset(self, seed=None, options=None):
        if seed is not None:
            Seeded.seeds.append(seed)
        return super().reset(seed=seed)


gym.register("Seeded-v0", Seeded)


def test_training_resuming_and_evaluation_see_different_episodes(tmp_path):
    Seeded.seeds.clear()
    run(tmp_path, env_id="Seeded-v0", seed=5)
    first, evaluation, film = Seeded.seeds[:4], Seeded.seeds[4:8], Seeded.seeds[8:]
    assert film == [5]
    Seeded.seeds.clear()
    last = next(tmp_path.glob("*/last.pt"))
    run(tmp_path, env_id="Seeded-v0", seed=5, resume=str(last), total_timesteps=256)
    resumed, again = Seeded.seeds[:4], Seeded.seeds[4:8]
    assert again == evaluation and len({*first, *evaluation, *resumed}) == 12


def test_evaluation_takes_the_first_episodes_of_each_environment():
    """As one environment after the other would play them."""
    args = tiny_args(env_id="Lopsided-v0", num_workers=0, num_envs=5)
    returns, _ = ppo.evaluate(counting_agent(), args, 20)
    seeds, expected = np.random.SeedSequence([args.seed, ppo.EVALUATION]).generate_state(5), []
    for seed in seeds.tolist():
        env = gym.make("Lopsided-v0")
        env.reset(seed=seed)
        for _ in range(4):
            expected.append(env.unwrapped.length)
            env.reset()
    assert returns.tolist() == expected


def test_one_thread_on_the_cpu():
    torch.set_num_threads(2)
    assert ppo.choose_device("auto", False).type == "cpu" and torch.get_num_threads() == 1


# ------------------------------------------------------------------------------------------ probes


def solve(tmp_path, probe, **options):
    """Trains on a probe; the agent of the last checkpoint, and the summary."""
    options = {
        "num_envs": 8, "num_steps": 16, "num_minibatches": 4, "update_epochs": 4, "gamma": 0.5,
        "learning_rate": 1e-2, "hidden_sizes": (16,), "norm_reward": False, "eval_episodes": 16,
        "total_timesteps": 6400, "save_every": 1000, **options,
    }  # fmt: skip
    summary, state, _ = run(tmp_path, env_id=f"tests.probes:{probe}-v0", **options)
    agent = make_agent(1, 2, (16,))
    agent.load_state_dict(state["agent"])
    return summary, agent


@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("ConstantValue", {0: 1}),
        ("ObsValue", {-1: -1, 1: 1}),
        ("TwoSteps", {0: 0.5, 1: 1}),
        ("Count", {0: 1.75, 1: 1.5, 2: 1}),
        ("CountTimeLimit", {0: 2, 1: 2, 2: 2}),  # 1 / (1 - gamma): the limit is not part of it
    ],
)
def test_probes_whose_answer_is_a_value(tmp_path, probe, values):
    for value_target in ("gae", "returns"):
        if value_target == "gae" or len(values) == 3:
            _, agent = solve(tmp_path / value_target, probe, value_target=value_target)
            with torch.no_grad():
                learned = agent.value(torch.tensor([[float(obs)] for obs in values]))
            # V of a limit's final observation is never trained, so what rests on it is less exact
            tolerance = 0.25 if probe == "CountTimeLimit" else 0.08
            close(learned, list(values.values()), rtol=0, atol=tolerance)


@pytest.mark.parametrize("norm_reward", [False, True])
@pytest.mark.parametrize("probe", ["BestAction", "ObsAction"])
def test_probes_whose_answer_is_a_policy(tmp_path, probe, norm_reward):
    summary, agent = solve(tmp_path, probe, norm_reward=norm_reward)
    assert summary["eval_return_mean"] == 1 and summary["return_mean_100"] > 0.9
    if not norm_reward and probe == "BestAction":
        with torch.no_grad():
            assert agent.value(torch.zeros(1, 1)).item() == pytest.approx(1, abs=0.15)
