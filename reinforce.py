"""REINFORCE (Williams 1992, doi:10.1007/BF00992696) with a baseline and reused data, in one file.

    python reinforce.py                              # CartPole-v1: train, evaluate, save, draw
    python reinforce.py --env-id LunarLander-v3      # with its preset
    python reinforce.py --evaluate runs/RUN/best.pt  # play a saved model

Where the estimator comes from. An episode x = s_0 a_0 s_1 a_1 ... has probability p(x), the product
of pi(a_t | s_t) and the environment's own p(s_t+1 | s_t, a_t). With R(x) the sum of its rewards,

    grad E[R] = sum_x R(x) grad p(x) = E[R grad log p]      because grad p = p grad log p
              = E[sum_t R grad log pi(a_t | s_t)]           the environment has no parameter of ours
              = E[sum_t G_t grad log pi(a_t | s_t)]         no action changes an earlier reward, so
                                                            G_t = r_t + gamma r_t+1 + ... will do
              = E[sum_t (G_t - b_t) grad log pi(a_t | s_t)] for any b_t that a_t does not change,
                                                            as sum_a grad pi(a | s) = grad 1 = 0.
Details that matter:
- N environments step together for a window of T steps. It starts with fresh episodes in all of
  them; an episode that ends is followed by the next one. T is best the longest episode's length.
- The baseline b_t is the mean return of the N environments at the same step: no critic is needed.
- Returns are divided by their deviation over the whole window, never over one episode, where late
  steps would always look bad. So one learning rate serves rewards of any scale.
- A window is used for several updates; importance weights keep the later ones right.
- Nothing here knows the value of a state, so a time limit counts as an end. `ppo.py` bootstraps.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn


@dataclass(frozen=True)
class Args:
    # experiment
    env_id: str = "CartPole-v1"  # Gymnasium environment id, `module:Env-v0` for one of your own
    seed: int = 1  # seeds torch and the environments
    total_timesteps: int = 500_000  # environment steps, rounded up to whole iterations
    # algorithm
    num_envs: int = 64  # parallel environments
    num_steps: int = 500  # steps of each environment per iteration: at best the longest episode
    updates_per_rollout: int = 4  # gradient steps on each window
    learning_rate: float = 1e-2  # learning rate
    anneal_lr: bool = True  # the learning rate falls linearly towards zero
    gamma: float = 1.0  # discount per step
    baseline: bool = True  # subtract the mean return of all environments at the same step
    normalize_returns: bool = True  # zero mean and unit deviation over the window
    unfinished: Literal["zero", "drop"] = "zero"  # what to do about episodes that a window cuts
    clip_coef: float | None = 1.0  # importance weights stay in 1 -+ this; None: as they are
    ent_coef: float = 0.0  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the policy

    def __post_init__(self):
        if self.baseline and self.num_envs == 1:
            raise UsageError(
                "--num-envs 1 with --baseline: the mean over one environment is its own return, so "
                "nothing is left to learn from; use more environments or --no-baseline"
            )


class UsageError(Exception):
    """Something the user can fix: printed as one line, exit code 2."""


class TrainingError(Exception):
    """Something that broke while running: its cause is printed, exit code 1."""


# ----------------------------------------------------------------------------------- environments


def make_env(env_id, render_mode=None):
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, render_mode=render_mode))


def make_vector_env(env_id, num_envs):
    """num_envs copies whose observation after an episode's end is the next episode's first one."""
    makers = [lambda: make_env(env_id)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


# --------------------------------------------------------------------------------------- networks


class PolicyNetwork(nn.Module):
    """Logits of the actions: obs [..., *obs_shape] -> [..., num_actions]."""

    def __init__(self, obs_shape, num_actions, hidden_sizes=(64, 64)):
        super().__init__()
        self.num_obs_dims = len(obs_shape)
        sizes = [math.prod(obs_shape), *hidden_sizes]
        layers = []
        for width, next_width in itertools.pairwise(sizes):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            nn.init.orthogonal_(layers[-2].weight, math.sqrt(2))
        layers.append(nn.Linear(sizes[-1], num_actions))
        nn.init.orthogonal_(layers[-1].weight, 0.01)  # the first policy is almost uniform
        for layer in layers[::2]:
            nn.init.zeros_(layer.bias)
        self.network = nn.Sequential(*layers)

    def forward(self, obs):
        return self.network(obs.reshape(*obs.shape[: obs.ndim - self.num_obs_dims], -1))


# -------------------------------------------------------------------------------- the mathematics


class RolloutTensors(NamedTuple):
    """A window of T steps of N environments; dones[:, t] is true where step t ended an episode."""

    obs: torch.Tensor  # [N, T, *obs_shape]
    actions: torch.Tensor  # [N, T]
    logprobs: torch.Tensor  # [N, T] of these actions under the policy that took them
    rewards: torch.Tensor  # [N, T]
    dones: torch.Tensor  # [N, T] bool


def compute_returns(rewards, done, gamma=0.9):
    """Discounted reward-to-go, which starts again after every done. [N, T] each -> [N, T]

    The sum starts from zero at the window's end: an episode alive there gets no credit for what it
    would still have earned, so its last actions look worse than they were. `--unfinished drop`
    ignores such tails instead, and with them long episodes. Long windows make both errors small.
    """
    rewards = rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
    returns, reward_to_go = torch.empty_like(rewards), torch.zeros_like(rewards[..., 0])
    for t in reversed(range(rewards.shape[-1])):
        reward_to_go = rewards[..., t] + gamma * reward_to_go.masked_fill(done[..., t].bool(), 0)
        returns[..., t] = reward_to_go
    return returns


def finished(done):
    """True where the step's episode ended within the window. [N, T] bool -> [N, T] bool"""
    return done.flip(-1).cummax(-1).values.flip(-1)


def normalize_returns(returns):
    """Zero mean and unit deviation over all environments and steps; zeros if all are equal."""
    centred = returns - returns.mean(dtype=torch.float64)  # float32 would leave a rest of constants
    return centred / (centred.std(correction=min(1, returns.numel() - 1)) + 1e-8)


def compute_logprobs(tau, pi):
    """log pi(action | obs) of a window's actions under the current policy, with gradient. [N, T]"""
    actions = tau.actions.long().unsqueeze(-1)
    return pi(tau.obs).log_softmax(-1).gather(-1, actions).squeeze(-1)


def compute_importance_weights(logprobs_taken, tau, clip_coef):
    """pi(action | obs) / pi_old(action | obs), without gradient. [N, T]

    After the first update the window shows an old policy: actions that the new one prefers are too
    rare in it. The ratio makes up for that (for each action, not for the states it leads to).
    Clamping keeps a few large ratios from ruling the update, at the price of a bias.
    """
    weights = (logprobs_taken.detach() - tau.logprobs).exp()
    weights = weights.clamp(max=torch.finfo(weights.dtype).max)  # huge, but never infinite
    return weights if clip_coef is None else weights.clamp(1 - clip_coef, 1 + clip_coef)


def compute_reinforce_loss(returns, logprobs_taken, iw):
    """Mean of iw * log-prob * advantage, an objective: MAXIMISE it. [N, T] each -> scalar

    The advantage is the return minus its mean over environments at the same step. That mean holds
    the return itself, so the expected gradient keeps its direction but only (N - 1) / N of its
    length: nothing if N = 1. Returns and weights are constants, only the log-prob has a gradient.
    """
    advantages = returns - returns.mean(0, keepdim=True)
    return (iw.detach() * logprobs_taken * advantages.detach()).mean()


# ------------------------------------------------------------------------------ collect and update


def get_actions(policy, obs):
    """Samples an action per observation. [N, *obs_shape] -> actions [N], their log-probs [N]"""
    logprobs = policy(obs).log_softmax(-1)
    actions = torch.multinomial(logprobs.exp(), 1)
    return actions.squeeze(-1), logprobs.gather(-1, actions).squeeze(-1)


@torch.no_grad()
def gen_rollout(envs, policy, num_steps, seeds=None):
    """Fills a window with new episodes; also returns the (return, length) of those that ended."""
    num_envs, (obs, _), episodes = envs.num_envs, envs.reset(seed=seeds), []
    tau = RolloutTensors(
        obs=torch.empty(num_envs, num_steps, *obs.shape[1:]),
        actions=torch.empty(num_envs, num_steps, dtype=torch.int64),
        logprobs=torch.empty(num_envs, num_steps),
        rewards=torch.empty(num_envs, num_steps),
        dones=torch.empty(num_envs, num_steps, dtype=torch.bool),
    )
    for t in range(num_steps):
        tau.obs[:, t] = torch.from_numpy(obs)
        check_finite("observation", obs, t)
        tau.actions[:, t], tau.logprobs[:, t] = get_actions(policy, tau.obs[:, t])
        obs, rewards, terminated, truncated, info = envs.step(tau.actions[:, t].numpy())
        check_finite("reward", rewards, t)
        tau.rewards[:, t] = torch.from_numpy(rewards)
        tau.dones[:, t] = torch.from_numpy(terminated | truncated)
        if "final_info" in info:
            ended, episode = info["_final_info"], info["final_info"]["episode"]
            episodes += zip(episode["r"][ended].tolist(), episode["l"][ended].tolist())
    return tau, episodes


def check_finite(name, values, step):
    """Stops at the first value that is not finite, before it spreads. values: [N, ...]"""
    if not np.isfinite(values).all():
        index = int(np.argwhere(~np.isfinite(values))[0, 0])
        raise TrainingError(f"non-finite {name} (environment {index}, step {step} of the window)")


def update(policy, optimizer, tau, args):
    """Gradient steps on one window; returns the means of what they logged."""
    returns = compute_returns(tau.rewards, tau.dones, args.gamma)
    if args.normalize_returns:
        returns = normalize_returns(returns)
    kept = finished(tau.dones) if args.unfinished == "drop" else torch.ones_like(tau.dones)
    rows = []
    for _ in range(args.updates_per_rollout):
        logprobs = compute_logprobs(tau, policy)
        weights = compute_importance_weights(logprobs, tau, args.clip_coef) * kept
        if args.baseline:
            objective = compute_reinforce_loss(returns, logprobs, weights)
        else:
            objective = (weights * logprobs * returns).mean()
        entropy = -logprobs.detach().mean()  # an estimate that costs nothing
        if args.ent_coef:
            all_logprobs = policy(tau.obs).log_softmax(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1).mean()
        optimizer.zero_grad()
        (-objective - args.ent_coef * entropy).backward()
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        log_ratio = logprobs.detach() - tau.logprobs
        approx_kl = (log_ratio.exp() - 1 - log_ratio).mean()
        rows.append(torch.stack([-objective.detach(), entropy.detach(), approx_kl, grad_norm]))
        optimizer.step()
    names = ["policy_loss", "entropy", "approx_kl", "grad_norm"]
    metrics = dict(zip((f"losses/{name}" for name in names), torch.stack(rows).mean(0).tolist()))
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingError(f"non-finite {name}; the last checkpoint is untouched")
    return metrics
