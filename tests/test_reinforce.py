"""reinforce.py: every equation against brute force or a closed form, then updates and runs."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import reinforce
from reinforce import (
    Args,
    PolicyNetwork,
    RolloutTensors,
    TrainingError,
    UsageError,
    compute_importance_weights,
    compute_logprobs,
    compute_reinforce_loss,
    compute_returns,
    evaluate,
    finished,
    gen_rollout,
    get_actions,
    make_vector_env,
    normalize_returns,
    train,
    update,
)

settings.register_profile("default", deadline=None, max_examples=60)
settings.load_profile("default")

sizes = st.tuples(st.integers(1, 4), st.integers(1, 12))  # N, T


def arrays(shape, bound=10.0):
    return hnp.arrays(np.float64, shape, elements=st.floats(-bound, bound, width=32))


@st.composite
def windows(draw):
    """rewards and done, [N, T] float64 and bool."""
    shape = draw(sizes)
    return torch.tensor(draw(arrays(shape))), torch.tensor(draw(hnp.arrays(bool, shape)))


@st.composite
def triples(draw):
    """Three [N, T] float64 arrays."""
    shape = draw(sizes)
    return [torch.tensor(draw(arrays(shape))) for _ in range(3)]


# ---------------------------------------------------------------------------------------- returns


@given(windows(), st.floats(0, 1))
def test_returns_equal_the_sum_written_out(window, gamma):
    rewards, done = window
    expected = torch.zeros_like(rewards)
    for n, t in itertools.product(*map(range, rewards.shape)):
        for k in range(t, rewards.shape[1]):
            expected[n, t] += gamma ** (k - t) * rewards[n, k]
            if done[n, k]:
                break
    torch.testing.assert_close(compute_returns(rewards, done, gamma), expected)


def test_returns_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1.0]])
    done = torch.tensor([[False, False, True, False, True]])
    by_default, with_half = compute_returns(rewards, done), compute_returns(rewards, done, 0.5)
    torch.testing.assert_close(by_default, torch.tensor([[0.81, 0.9, 1.0, 0.9, 1.0]]))
    torch.testing.assert_close(with_half, torch.tensor([[0.25, 0.5, 1.0, 0.5, 1.0]]))


def test_returns_of_a_doubled_episode_repeat():
    done = torch.tensor([[False, False, True] * 2])
    returns = compute_returns(torch.ones(1, 6), done, 0.99)
    torch.testing.assert_close(returns, torch.tensor([[2.9701, 1.99, 1.0] * 2]))


def test_an_unfinished_tail_gets_no_credit_for_later_rewards():
    done = torch.zeros(1, 4, dtype=torch.bool)
    assert compute_returns(torch.ones(1, 4), done, 1.0).tolist() == [[4, 3, 2, 1]]


@given(windows())
def test_rows_are_independent(window):
    rewards, done = window
    together = compute_returns(rewards, done)
    alone = [compute_returns(rewards[n : n + 1], done[n : n + 1]) for n in range(len(rewards))]
    assert torch.equal(together, torch.cat(alone))


def test_nothing_crosses_an_episode_border_not_even_nan():
    rewards = torch.tensor([[1.0, math.nan]])
    assert compute_returns(rewards, torch.tensor([[True, True]]))[0, 0] == 1


def test_returns_of_integer_rewards_are_not_rounded():
    rewards, done = torch.tensor([[0, 0, 1]]), torch.tensor([[False, False, True]])
    torch.testing.assert_close(compute_returns(rewards, done), torch.tensor([[0.81, 0.9, 1.0]]))


def test_returns_keep_float64():
    rewards = torch.full((1, 1000), 0.1, dtype=torch.float64)
    returns = compute_returns(rewards, torch.zeros(1, 1000, dtype=torch.bool), 1.0)
    assert returns.dtype == torch.float64
    assert abs(returns[0, 0] - 100) < 1e-10


def test_returns_of_long_windows_are_precise():
    rewards = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0))
    done = torch.zeros(8, 2000, dtype=torch.bool)
    exact = compute_returns(rewards.double(), done, 0.99)
    assert (compute_returns(rewards, done, 0.99) - exact).abs().max() < 1e-4


@given(windows())
def test_inputs_are_not_changed(window):
    rewards, done = window
    before = rewards.clone(), done.clone()
    compute_returns(rewards, done)
    finished(done)
    assert torch.equal(rewards, before[0]) and torch.equal(done, before[1])


@given(windows())
def test_finished_means_a_done_at_this_step_or_later(window):
    _, done = window
    expected = [[bool(done[n, t:].any()) for t in range(done.shape[1])] for n in range(len(done))]
    assert finished(done).tolist() == expected


# ---------------------------------------------------------------------------------- normalisation


@given(sizes.flatmap(arrays))
def test_normalized_returns_have_mean_zero_and_deviation_one(returns):
    normalized = normalize_returns(torch.tensor(returns))
    assert normalized.isfinite().all()
    assert abs(normalized.mean()) < 1e-6
    if returns.size > 1 and returns.std() > 1e-3:
        expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-8)
        np.testing.assert_allclose(normalized, expected, atol=1e-8)
        assert abs(normalized.std() - 1) < 1e-4


def test_normalization_is_over_the_batch_not_over_each_episode():
    normalized = normalize_returns(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]))
    expected = torch.tensor([[1.1180, 0, -1.1180]] * 2)  # the unbiased deviation is 0.8944
    torch.testing.assert_close(normalized, expected, atol=1e-4, rtol=0)
    different = normalize_returns(torch.tensor([[3.0, 2.0], [30.0, 20.0]]))
    assert different[0].max() < different[1].min()


@pytest.mark.parametrize("value", [0.0, 2.0, 0.1, 100.1, -1e6])
def test_constant_returns_become_zero(value):
    assert torch.equal(normalize_returns(torch.full((3, 333), value)), torch.zeros(3, 333))


def test_a_single_return_becomes_zero():
    assert normalize_returns(torch.tensor([[3.0]])).tolist() == [[0.0]]


# ---------------------------------------------------------------------------------------- weights


def random_tau(N=3, T=5, obs_size=2, num_actions=3, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    tau = RolloutTensors(
        obs=torch.randn(N, T, obs_size, generator=generator),
        actions=torch.randint(num_actions, (N, T), generator=generator),
        logprobs=-torch.rand(N, T, generator=generator),
        rewards=torch.randn(N, T, generator=generator),
        dones=torch.rand(N, T, generator=generator) < 0.3,
    )
    return tau._replace(**fields)


def test_logprobs_are_those_of_a_categorical_with_gradient():
    policy, tau = PolicyNetwork((2,), 3, (8,)), random_tau()
    logprobs = compute_logprobs(tau, policy)
    expected = torch.distributions.Categorical(logits=policy(tau.obs)).log_prob(tau.actions)
    assert logprobs.shape == (3, 5)
    torch.testing.assert_close(logprobs, expected)
    logprobs.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.parameters())


def test_any_object_with_the_five_fields_is_a_window():
    policy, tau = PolicyNetwork((2,), 3, (8,)), random_tau()
    other = SimpleNamespace(**tau._asdict())
    logprobs = compute_logprobs(other, policy)
    assert torch.equal(logprobs, compute_logprobs(tau, policy))
    weights = [compute_importance_weights(logprobs, window, 0.2) for window in (tau, other)]
    assert torch.equal(*weights)


@given(triples(), st.none() | st.floats(0, 1))
def test_weights_are_clamped_ratios(triple, clip_coef):
    new, old, _ = triple
    weights = compute_importance_weights(new, SimpleNamespace(logprobs=old), clip_coef)
    expected = np.exp(new.numpy() - old.numpy())
    if clip_coef is not None:
        expected = np.clip(expected, 1 - clip_coef, 1 + clip_coef)
    np.testing.assert_allclose(weights, expected)


def test_weights_subtract_before_they_exponentiate():
    new, old = torch.tensor([[-200.0]]), torch.tensor([[-201.0]])  # exp(-200) is 0 in float32
    weights = compute_importance_weights(new, SimpleNamespace(logprobs=old), None)
    torch.testing.assert_close(weights, torch.tensor([[math.e]]))


@pytest.mark.parametrize("difference", [-3e38, -1e4, 0.0, 1e4, 3e38])
@pytest.mark.parametrize("clip_coef", [None, 0.2])
def test_weights_of_finite_logprobs_are_finite(difference, clip_coef):
    new = torch.tensor([[difference]])
    tau = SimpleNamespace(logprobs=torch.tensor([[-difference]]))
    assert compute_importance_weights(new, tau, clip_coef).isfinite().all()


def test_weights_carry_no_gradient():
    logprobs = torch.zeros(2, 2, requires_grad=True)
    assert not compute_importance_weights(logprobs, random_tau(2, 2), 0.2).requires_grad


# ------------------------------------------------------------------------------------------- loss


@given(triples())
def test_loss_equals_the_sum_written_out(triple):
    returns, logprobs, weights = triple
    N, T = returns.shape
    expected = 0.0
    for n, t in itertools.product(range(N), range(T)):
        baseline = sum(returns[m, t] for m in range(N)) / N
        expected += weights[n, t] * logprobs[n, t] * (returns[n, t] - baseline) / (N * T)
    assert abs(compute_reinforce_loss(returns, logprobs, weights) - expected) < 1e-9


@given(triples())
def test_loss_has_a_gradient_through_the_logprobs_only(triple):
    returns, logprobs, weights = (tensor.requires_grad_() for tensor in triple)
    compute_reinforce_loss(returns, logprobs, weights).backward()
    assert returns.grad is None and weights.grad is None
    with torch.no_grad():
        expected = weights * (returns - returns.mean(0)) / returns.numel()
    torch.testing.assert_close(logprobs.grad, expected)


def test_one_environment_leaves_nothing():
    assert compute_reinforce_loss(torch.randn(1, 4), torch.randn(1, 4), torch.ones(1, 4)) == 0


def test_a_reward_credits_no_later_action():
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    done = torch.tensor([[False, False, True]] * 2)
    logprobs = torch.zeros(2, 3, requires_grad=True)
    returns = compute_returns(rewards, done, 1.0)
    compute_reinforce_loss(returns, logprobs, torch.ones(2, 3)).backward()
    assert logprobs.grad[0, 0] > 0 > logprobs.grad[1, 0]
    assert torch.equal(logprobs.grad[:, 1:], torch.zeros(2, 2))


# ---------------------------------- the estimator's expectation, on a problem small enough to sum


class TinyMDP:
    """Two states, two actions, T steps; episodes start in state 0. Float64 throughout."""

    T = 3
    next_state = torch.tensor(np.array([[[0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.1, 0.9]]]))
    reward = torch.tensor(np.array([[1.0, 0.0], [-0.5, 2.0]]))  # [state, action]

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(2, 2, generator=generator, dtype=torch.float64).requires_grad_()
        self.old_logits = torch.randn(2, 2, generator=generator, dtype=torch.float64)

    def policy(self, obs):
        return self.logits[obs]

    def expected_return(self, logits, T=None):
        """By dynamic programming, with no sampling and no score function."""
        value = torch.zeros(2, dtype=torch.float64)
        for _ in range(T or self.T):
            value = (logits.softmax(-1) * (self.reward + self.next_state @ value)).sum(-1)
        return value[0]

    def trajectories(self, logits, T=None):
        """All of them as one window [number, T], and the probability of each."""
        T = T or self.T
        rows, probabilities = [], []
        policy = logits.detach().softmax(-1)
        for later_states in itertools.product(range(2), repeat=T - 1):
            states = (0, *later_states)
            for actions in itertools.product(range(2), repeat=T):
                probability = 1.0
                for t in range(T):
                    probability *= policy[states[t], actions[t]]
                    if t + 1 < T:
                        probability *= self.next_state[states[t], actions[t], states[t + 1]]
                rows.append((states, actions))
                probabilities.append(probability)
        obs, actions = (torch.tensor(column) for column in zip(*rows))
        dones = torch.zeros(len(rows), T, dtype=torch.bool)
        dones[:, -1] = True
        rewards, logprobs = self.reward[obs, actions], policy.log()[obs, actions]
        return RolloutTensors(obs, actions, logprobs, rewards, dones), torch.stack(probabilities)

    def estimate(self, tau, baseline, clip_coef=None, weighted=True):
        """The gradient that reinforce.py computes for one window, [2, 2]."""
        returns = compute_returns(tau.rewards, tau.dones, 1.0)
        logprobs = compute_logprobs(tau, self.policy)
        weights = compute_importance_weights(logprobs, tau, clip_coef)
        weights = weights if weighted else torch.ones_like(weights)
        if baseline:
            objective = compute_reinforce_loss(returns, logprobs, weights)
        else:
            objective = (weights * logprobs * returns).mean()
        return torch.autograd.grad(objective, self.logits)[0]


def pick(tau, rows):
    return RolloutTensors(*(field[list(rows)] for field in tau))


@pytest.mark.parametrize("seed", range(3))
def test_expected_estimate_is_the_gradient_of_the_expected_return(seed):
    mdp = TinyMDP(seed)
    exact = torch.autograd.grad(mdp.expected_return(mdp.logits), mdp.logits)[0]
    tau, probabilities = mdp.trajectories(mdp.logits)
    assert abs(probabilities.sum() - 1) < 1e-12
    expected = 0.0
    for i, probability in enumerate(probabilities):
        expected += probability * mdp.estimate(pick(tau, [i]), baseline=False)
    torch.testing.assert_close(expected * mdp.T, exact)  # the loss is a mean over T steps


@pytest.mark.parametrize("seed", range(2))
def test_the_baseline_leaves_the_expected_direction_unchanged(seed):
    """All pairs of trajectories, each with its probability: (N - 1) / N of the exact gradient."""
    mdp = TinyMDP(seed)
    mdp.T = 2
    exact = torch.autograd.grad(mdp.expected_return(mdp.logits), mdp.logits)[0]
    tau, probabilities = mdp.trajectories(mdp.logits)
    expected = 0.0
    for i, j in itertools.product(range(len(probabilities)), repeat=2):
        estimate = mdp.estimate(pick(tau, [i, j]), baseline=True)
        expected += probabilities[i] * probabilities[j] * estimate
    torch.testing.assert_close(expected * mdp.T, exact / 2)


def test_importance_weights_correct_the_expectation_for_an_old_policy():
    mdp = TinyMDP(1)
    exact = torch.autograd.grad(mdp.expected_return(mdp.logits, T=1), mdp.logits)[0]
    tau, probabilities = mdp.trajectories(mdp.old_logits, T=1)

    def expected(**options):
        rows = enumerate(probabilities)
        return sum(p * mdp.estimate(pick(tau, [i]), baseline=False, **options) for i, p in rows)

    torch.testing.assert_close(expected(), exact)
    assert (expected(weighted=False) - exact).abs().max() > 0.01  # another gradient
    assert (expected(clip_coef=0.1) - exact).abs().max() > 0.01  # clamping has its price


# ---------------------------------------------------------------------------------- policy, rollout


def test_policy_shapes():
    policy = PolicyNetwork((4,), 3)
    assert policy(torch.zeros(4)).shape == (3,)
    assert policy(torch.zeros(7, 4)).shape == (7, 3)
    assert policy(torch.zeros(2, 7, 4)).shape == (2, 7, 3)
    assert PolicyNetwork((2, 3), 5, hidden_sizes=(8,))(torch.zeros(7, 2, 3)).shape == (7, 5)
    assert PolicyNetwork((2,), 5, hidden_sizes=())(torch.zeros(7, 2)).shape == (7, 5)


def test_actions_are_drawn_with_the_probabilities_of_the_logits():
    torch.manual_seed(0)
    logits = torch.tensor([0.1, 0.2, 0.7]).log() + 5
    actions, logprobs = get_actions(lambda obs: logits.expand(len(obs), 3), torch.zeros(20_000, 1))
    assert actions.shape == logprobs.shape == (20_000,)
    frequencies = torch.bincount(actions, minlength=3) / 20_000
    torch.testing.assert_close(frequencies, torch.tensor([0.1, 0.2, 0.7]), atol=0.015, rtol=0)
    torch.testing.assert_close(logprobs, (logits - 5)[actions])


def rollout(env_id, num_envs=2, num_steps=12, seed=0, policy=None):
    envs = make_vector_env(env_id, num_envs)
    torch.manual_seed(seed)
    num_actions = envs.single_action_space.n
    policy = policy or PolicyNetwork(envs.single_observation_space.shape, num_actions, (8,))
    seeds = np.random.SeedSequence(seed).generate_state(num_envs).tolist()
    tau, episodes = gen_rollout(envs, policy, num_steps, seeds)
    envs.close()
    return tau, episodes, policy


@pytest.mark.parametrize("env_id", ["tests.probes:Count-v0", "tests.probes:CountTimeLimit-v0"])
def test_a_window_holds_whole_episodes_one_after_the_other(env_id):
    tau, episodes, _ = rollout(env_id)
    assert tau.obs.tolist() == [[[0], [1], [2]] * 4] * 2
    assert tau.dones.tolist() == [[False, False, True] * 4] * 2
    assert tau.rewards.sum(1).tolist() == [12, 12]  # no step is lost to a reset
    assert episodes == [(3.0, 3)] * 8


def test_recorded_logprobs_are_those_of_the_recorded_actions():
    tau, _, policy = rollout("CartPole-v1")
    with torch.no_grad():
        torch.testing.assert_close(tau.logprobs, compute_logprobs(tau, policy))
    assert tau.actions.dtype == torch.int64 and tau.dones.dtype == torch.bool
    assert tau.rewards.dtype == tau.obs.dtype == torch.float32
    assert not any(field.requires_grad for field in tau)


def test_actions_and_rewards_belong_to_the_same_step():
    tau, _, _ = rollout("tests.probes:ObsAction-v0", num_envs=4, num_steps=50)
    expected = torch.where((tau.actions == 1) == (tau.obs[..., 0] > 0), 1.0, -1.0)
    assert torch.equal(tau.rewards, expected)


def test_environments_have_different_seeds_and_a_seed_repeats():
    first, _, _ = rollout("CartPole-v1", num_envs=8)
    again, _, _ = rollout("CartPole-v1", num_envs=8)
    other, _, _ = rollout("CartPole-v1", num_envs=8, seed=1)
    assert len(first.obs[:, 0].unique(dim=0)) == 8
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first.obs, other.obs)


@pytest.mark.parametrize(("probe", "name"), [("NaNReward", "reward"), ("NaNObs", "observation")])
def test_a_value_that_is_not_finite_stops_the_rollout_by_name(probe, name):
    with pytest.raises(TrainingError, match=f"non-finite {name} from environment 0, step"):
        rollout(f"tests.probes:{probe}-v0")


# ------------------------------------------------------------------------------------------ update


def one_update(tau, seed=0, **options):
    torch.manual_seed(seed)
    policy = PolicyNetwork((2,), 3, (8,))
    tau = tau._replace(logprobs=compute_logprobs(tau, policy).detach())
    before = [parameter.clone() for parameter in policy.parameters()]
    args = Args(**{"learning_rate": 0.01, "updates_per_rollout": 1, **options})
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate)
    metrics = update(policy, optimizer, tau, args)
    moved = [not torch.equal(old, new) for old, new in zip(before, policy.parameters())]
    return policy, tau, metrics, any(moved)


def test_an_update_makes_rewarded_actions_likelier():
    tau = random_tau(N=8, T=16, dones=torch.ones(8, 16, dtype=torch.bool))
    tau = tau._replace(rewards=(tau.actions == 2).float())
    policy, tau, _, _ = one_update(tau, updates_per_rollout=20)
    gained = compute_logprobs(tau, policy).detach() - tau.logprobs
    assert gained[tau.actions == 2].min() > 0.1
    assert gained[tau.actions != 2].mean() < -0.1


def test_normalized_returns_make_the_scale_of_rewards_irrelevant():
    tau = random_tau(N=8, T=16)
    losses = [
        one_update(tau._replace(rewards=tau.rewards * scale), normalize_returns=normalize)[2]
        for scale, normalize in [(1, True), (1000, True), (1, False), (1000, False)]
    ]
    small, large, raw_small, raw_large = (loss["losses/policy_loss"] for loss in losses)
    assert abs(large / small - 1) < 1e-3
    assert abs(raw_large / raw_small - 1000) < 1


@pytest.mark.parametrize("clip_coef", [None, 0.1])
def test_an_update_weighs_old_data_and_logs_what_the_equations_say(clip_coef):
    tau = random_tau(N=8, T=16)  # its logprobs are those of no policy that we have
    policy = PolicyNetwork((2,), 3, (8,))
    with torch.no_grad():
        logprobs = compute_logprobs(tau, policy)
    ratio = (logprobs - tau.logprobs).exp()
    weights = ratio if clip_coef is None else ratio.clamp(0.9, 1.1)
    returns = compute_returns(tau.rewards, tau.dones, 0.9)
    expected = -(weights * logprobs * (returns - returns.mean(0))).mean()
    args = Args(gamma=0.9, normalize_returns=False, updates_per_rollout=1, clip_coef=clip_coef)
    metrics = update(policy, torch.optim.Adam(policy.parameters()), tau, args)
    assert metrics["losses/policy_loss"] == pytest.approx(expected.item(), rel=1e-5)
    approx_kl = (ratio - 1 - ratio.log()).mean()
    assert metrics["losses/approx_kl"] == pytest.approx(approx_kl.item(), rel=1e-5)


def test_gradients_are_clipped_to_the_norm_asked_for():
    tau = random_tau(N=8, T=16)
    policy, *_ = one_update(tau, max_grad_norm=1e-3, normalize_returns=False)
    norm = torch.stack([parameter.grad.norm() for parameter in policy.parameters()]).norm()
    assert abs(norm - 1e-3) < 1e-6


def test_weights_are_one_in_the_first_update_and_not_after_it():
    tau = random_tau(N=8, T=16)
    policy, tau, first, _ = one_update(tau)
    assert first["losses/approx_kl"] < 1e-10
    weights = compute_importance_weights(compute_logprobs(tau, policy), tau, None)
    assert (weights - 1).abs().max() > 1e-4
    assert one_update(tau, updates_per_rollout=3)[2]["losses/approx_kl"] > 1e-6


def test_a_baseline_of_one_environment_is_refused():
    with pytest.raises(UsageError, match=r"num-envs 1.*baseline"):
        Args(num_envs=1)
    Args(num_envs=1, baseline=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_envs", 0), ("total_timesteps", 0), ("gamma", 1.1), ("clip_coef", -0.1),
     ("hidden_sizes", (64, 0)), ("learning_rate", math.nan)],
)  # fmt: skip
def test_impossible_options_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        Args(**{name: value})


@pytest.mark.parametrize(
    "options", [{}, {"unfinished": "drop"}, {"baseline": False}, {"clip_coef": None}]
)
def test_one_environment_and_one_step_stay_finite(options):
    policy, *_ = one_update(random_tau(1, 1), **options)
    assert all(parameter.isfinite().all() for parameter in policy.parameters())


def test_dropped_tails_have_no_effect():
    dones = torch.zeros(2, 5, dtype=torch.bool)
    assert one_update(random_tau(2, 5, dones=dones), unfinished="zero")[3]
    assert not one_update(random_tau(2, 5, dones=dones), unfinished="drop")[3]


def test_the_entropy_bonus_alone_raises_entropy():
    tau = random_tau(2, 50, rewards=torch.ones(2, 50), dones=torch.ones(2, 50, dtype=torch.bool))
    torch.manual_seed(0)
    policy = PolicyNetwork((2,), 3, (8,))
    with torch.no_grad():
        policy.network[-1].weight.mul_(200)  # far from uniform
    tau = tau._replace(logprobs=compute_logprobs(tau, policy).detach())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    entropies = [
        update(policy, optimizer, tau, Args(ent_coef=0.1, updates_per_rollout=1))["losses/entropy"]
        for _ in range(10)
    ]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 0.01
    assert entropies[-1] <= math.log(3) + 1e-6


def test_a_gradient_that_is_not_finite_stops_training_by_name():
    with pytest.raises(TrainingError, match="non-finite"):
        one_update(random_tau(2, 3, rewards=torch.tensor([[1.0, math.inf, 0.0], [0.0, 1.0, 2.0]])))


# ------------------------------------------------------------------------------------ environments


class Spaces(gym.Env):
    """One step; remembers the last action that reached it."""

    def __init__(self, observation_space, action_space, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.last_action = None

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.last_action = action
        return self.observation_space.sample(), 1.0, True, False, {}


gym.register("Spaces-v0", Spaces, disable_env_checker=True)
vector, image = Box(-1, 1, (3,), np.float64), Box(0, 255, (8, 8, 3), np.uint8)


def vector_env_of(monkeypatch, observation_space, action_space):
    spaces = {"observation_space": observation_space, "action_space": action_space}
    monkeypatch.setattr(gym.registry["Spaces-v0"], "kwargs", spaces)
    return make_vector_env("Spaces-v0", 3)


def test_discrete_observations_become_one_hot(monkeypatch):
    envs = vector_env_of(monkeypatch, Discrete(4, start=1), Discrete(2))
    tau, _ = gen_rollout(envs, PolicyNetwork((4,), 2), 6)
    assert tau.obs.shape == (3, 6, 4)
    assert torch.equal(tau.obs.sum(-1), torch.ones(3, 6))


def test_float64_observations_train(monkeypatch):
    envs = vector_env_of(monkeypatch, vector, Discrete(2))
    policy = PolicyNetwork((3,), 2)
    tau, _ = gen_rollout(envs, policy, 6)
    metrics = update(policy, torch.optim.Adam(policy.parameters()), tau, Args())
    assert all(math.isfinite(value) for value in metrics.values())


def test_actions_that_start_elsewhere_are_shifted(monkeypatch):
    envs = vector_env_of(monkeypatch, vector, Discrete(2, start=5))
    tau, _ = gen_rollout(envs, PolicyNetwork((3,), 2), 6)
    assert set(tau.actions.unique().tolist()) <= {0, 1}
    assert [env.unwrapped.last_action for env in envs.envs] == (tau.actions[:, -1] + 5).tolist()


@pytest.mark.parametrize(
    ("observation_space", "action_space", "named"),
    [
        (vector, Box(-1, 1, (2,)), "Box actions"),
        (vector, MultiDiscrete([3, 4]), "MultiDiscrete actions"),
        (image, Discrete(2), "Box observations"),
        (gym.spaces.Dict(a=vector), Discrete(2), "Dict observations"),
        (gym.spaces.Tuple([vector]), Discrete(2), "Tuple observations"),
    ],
)
def test_other_spaces_are_refused_by_name(monkeypatch, observation_space, action_space, named):
    with pytest.raises(UsageError, match=rf"Spaces-v0 has {named}.*use ppo\.py"):
        vector_env_of(monkeypatch, observation_space, action_space)


# ------------------------------------------------------------------------- evaluation, whole runs


def test_evaluation_takes_the_same_number_of_episodes_from_every_environment():
    args = Args(env_id="tests.probes:Count-v0", num_envs=8)
    returns, lengths = evaluate(PolicyNetwork((1,), 2), args, 12)
    assert returns.tolist() == [3.0] * 12 and lengths.tolist() == [3] * 12


def test_evaluation_is_greedy_or_sampled_as_asked():
    policy = PolicyNetwork((1,), 2)
    with torch.no_grad():
        policy.network[-1].bias[1] = 0.5  # prefers action 1, which earns 1, with probability 0.62
    args = Args(env_id="tests.probes:BestAction-v0", num_envs=8)
    greedy, _ = evaluate(policy, args, 200)
    sampled, _ = evaluate(policy, replace(args, deterministic=False), 200)
    assert greedy.mean() == 1
    assert 0 < sampled.mean() < 0.5


SMALL = {"num_envs": 16, "num_steps": 16, "total_timesteps": 30_000, "wandb_mode": "disabled"}


@pytest.mark.parametrize("probe", ["BestAction", "ObsAction"])
def test_probes_whose_answer_is_a_policy_are_solved(probe, tmp_path):
    args = Args(env_id=f"tests.probes:{probe}-v0", runs_dir=str(tmp_path), **SMALL)
    summary = train(args)
    assert summary["return_mean_100"] > 0.9 and summary["eval_return_mean"] == 1


@pytest.mark.parametrize("probe", ["ConstantValue", "ObsValue", "TwoSteps"])
def test_probes_that_teach_a_policy_nothing_do_no_harm(probe, tmp_path):
    options = {**SMALL, "total_timesteps": 2048}
    args = Args(env_id=f"tests.probes:{probe}-v0", runs_dir=str(tmp_path), **options)
    assert math.isfinite(train(args)["eval_return_mean"])


def test_a_seed_repeats_a_run_bit_for_bit(tmp_path):
    def weights(seed):
        options = {**SMALL, "total_timesteps": 1000, "eval_episodes": 4, "seed": seed}
        train(Args(env_id="CartPole-v1", runs_dir=str(tmp_path / str(len(runs))), **options))
        runs.append(seed)
        return torch.load(next(tmp_path.glob(f"{len(runs) - 1}/*/last.pt")))["agent"]

    runs = []
    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_no_two_windows_or_runs_share_an_environment_seed(monkeypatch, tmp_path):
    seen = []

    def noting(envs, policy, num_steps, seeds):
        seen.extend(seeds)
        return gen_rollout(envs, policy, num_steps, seeds)

    monkeypatch.setattr(reinforce, "gen_rollout", noting)
    options = {**SMALL, "total_timesteps": 1024, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    for seed in (1, 2):
        train(Args(env_id="tests.probes:ObsAction-v0", seed=seed, **options))
    assert len(seen) == len(set(seen)) == 2 * 4 * 16


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    options = {**SMALL, "env_id": "CartPole-v1", "eval_episodes": 4, "anneal_lr": False}
    whole = Args(**{**options, "total_timesteps": 2048, "runs_dir": str(tmp_path / "whole")})
    half = replace(whole, total_timesteps=1024, runs_dir=str(tmp_path / "half"))
    train(whole)
    train(half)
    last = next(tmp_path.glob("half/*/last.pt"))
    train(replace(whole, resume=str(last)))
    expected, resumed = torch.load(next(tmp_path.glob("whole/*/last.pt"))), torch.load(last)
    assert resumed["progress"]["global_step"] == 2048
    assert resumed["progress"]["recent_returns"] == expected["progress"]["recent_returns"]
    weights, resumed_weights = expected["agent"], resumed["agent"]
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)


def test_cartpole_is_learned(tmp_path):
    summary = train(Args(runs_dir=str(tmp_path), wandb_mode="disabled"))
    assert summary["return_mean_100"] >= 475
    assert summary["eval_return_mean"] >= 475
