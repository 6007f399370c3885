"""DreamerV3 (Hafner et al. 2023, arXiv:2301.04104) in one file, with its actor loss at the centre.

    python dreamer_actor_loss.py                              # CartPole-v1: train, evaluate, save
    python dreamer_actor_loss.py --env-id Pendulum-v1         # continuous actions, with its preset
    python dreamer_actor_loss.py --evaluate runs/RUN/best.pt  # play a saved model

Why the paper normalises the return and the code the advantage. With R the lambda-return, V the
critic, sg "no gradient" and S the scale, the actor's objectives are

    paper  E[log pi(a|s) sg(R / S)] + ent_coef H[pi]    code  E[log pi(a|s) sg((R - V) / S)] + ...

Their expected gradients are equal: V does not depend on the action and E[grad log pi(a|s)] = 0, so
the baseline V / S only removes variance (an offset taken from both R and V cancels altogether).
What matters is what S is the scale of. It is the range of the *returns*,

    S = max(1, running 95th percentile of R - running 5th percentile of R),

never that of the advantages. Large returns come down to a range of about one, so one ent_coef suits
every reward scale. Small ones are not blown up, and as the critic gets better R - V shrinks while
S stays: where nothing more is to be gained the entropy bonus wins and the policy explores. Divided
by their own deviation instead, as is common elsewhere, advantages always have size one, even if
they are nothing but noise. `--advantage return-scaled|return-only|advantage-scaled` shows it: see
actor/policy_grad_norm, actor/entropy_grad_norm, actor/grad_ratio, actor/entropy and
actor/return_scale.

Details that matter:
- All actor gradients are REINFORCE, also for continuous actions: none passes through the dynamics.
- The continue head is trained towards (1 - terminated) * gamma: its probability is the discount.
- Actor and critic losses, entropy included, are weighted by the probability of getting that far,
  that of the first state included: what follows a terminal state teaches nothing.
- Reward and value are categorical over exponentially spaced bins and start at exactly zero.
- Every categorical is mixed with 1% uniform, in sampling, log-probs, KL and entropy alike.
- One LaProp optimiser with adaptive gradient clipping, one backward pass for all losses.
- The replay keeps the model's latent states; sequences start from them and refresh them.
"""

import time

START = time.perf_counter()  # before the slow imports, so that a run can tell its whole duration

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import difflib
import importlib
import io
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image
from torch import nn
from tqdm import tqdm

SCRIPT = "dreamer_actor_loss"
BEST_OF = 10  # best.pt holds the model with the best mean of this many training episodes

SIZE_NAMES = ("deter", "hidden", "stoch", "classes", "units", "layers", "blocks")
SIZES = {  # 1m and up are the official ones
    "tiny": (128, 64, 8, 8, 64, 2, 1),
    "small": (192, 96, 12, 12, 96, 2, 1),
    "1m": (512, 64, 32, 4, 64, 3, 8),
    "12m": (2048, 256, 32, 16, 256, 3, 8),
    "25m": (3072, 384, 32, 24, 384, 3, 8),
    "50m": (4096, 512, 32, 32, 512, 3, 8),
    "100m": (6144, 768, 32, 48, 768, 3, 8),
    "200m": (8192, 1024, 32, 64, 1024, 3, 8),
    "400m": (12288, 1536, 32, 96, 1536, 3, 8),
}
# What trains well where; anything given on the command line wins over it.
PRESETS = {
    # A longer run goes on with the small rate; with a large one it forgets now and then.
    "CartPole": {"total_timesteps": 10_000, "anneal_steps": 10_000},
    "Pendulum": {"total_timesteps": 8_000},
    # Landing takes small velocities, which the model keeps only if they weigh more. A slow start:
    # until the return percentiles have grown, advantages are divided by too little. The last 100 of
    # a landing come after 25 still steps, which nobody sees who chooses anew at each of them.
    "LunarLander": {
        "total_timesteps": 60_000, "num_envs": 4, "action_repeat": 4, "train_ratio": 256.0,
        "learning_starts": 1000, "rec_scale": 10.0, "gamma": 0.99, "ent_coef": 3e-4, "warmup": 1000,
    },
}


@dataclass(frozen=True)
class Args:
    # experiment
    env_id: str = "CartPole-v1"  # Gymnasium environment id, `module:Env-v0` for one of your own
    seed: int = 1  # seeds torch, the replay and the environments
    total_timesteps: int = 100_000  # environment steps
    device: str = "auto"  # cpu, cuda, mps; auto is the CPU, which is faster for small networks
    runs_dir: str = "runs"  # where the run's folder is created
    log_every: int = 250  # environment steps between two rows of metrics
    save_every: int = 2  # rows between two checkpoints
    eval_episodes: int = 20  # episodes of the evaluation
    deterministic: bool = True  # evaluate the most likely action instead of a sampled one
    evaluate: str | None = None  # play this checkpoint instead of training
    resume: str | None = None  # continue the run of this checkpoint
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline needs no account
    wandb_project: str = "single-file-rl"  # W&B project
    num_envs: int = 1  # environments stepped together
    action_repeat: int = 1  # environment steps for which each action is kept
    # algorithm: size
    size: str = "tiny"  # row of the table SIZES; the next seven override single entries of it
    deter: int | None = None  # width of the recurrent state
    hidden: int | None = None  # width of the recurrent state's input layers
    stoch: int | None = None  # categorical latents
    classes: int | None = None  # classes per latent
    units: int | None = None  # width of encoder, decoder and heads
    layers: int | None = None  # layers of encoder, decoder, policy and value
    blocks: int | None = None  # blocks of the recurrent weight matrices
    num_bins: int = 63  # bins of the reward and value heads (official: 255)
    # algorithm: schedule
    batch_size: int = 16  # sequences per update
    batch_length: int = 16  # steps per sequence (official: 64)
    train_ratio: float = 128.0  # replayed steps per action of the agent: sets the number of updates
    learning_starts: int = 500  # environment steps before the first update
    replay_capacity: int = 100_000  # steps kept
    learning_rate: float = 1e-3  # official: 4e-5
    final_lr_fraction: float = 0.1  # share of the rate left at the end (official: 1)
    anneal_steps: int = 0  # environment steps over which the rate falls to that share, 0: all
    warmup: int = 200  # updates over which the rate rises from 0 (official: 1000)
    # algorithm: losses
    advantage: Literal["return-scaled", "return-only", "advantage-scaled"] = "return-scaled"
    horizon: int = 15  # imagined steps
    imag_last: int = 0  # imagine from the last n states of each sequence only, 0: from all
    gamma: float = 1 - 1 / 333  # discount, inside the continue head
    lam: float = 0.95  # mix of n-step returns
    ent_coef: float = 1e-3  # entropy bonus (official: 3e-4)
    policy_unimix: float = 0.01  # uniform part of a discrete policy (official code: 0)
    free_nats: float = 1.0  # KL below which the world model's KL losses stop
    rec_scale: float = 1.0  # weight of the reconstruction; small observations need more
    dyn_scale: float = 1.0  # weight of KL(sg(posterior) || prior)
    rep_scale: float = 0.1  # weight of KL(posterior || sg(prior))
    replay_value_scale: float = 0.3  # weight of the critic's loss on replayed states
    slow_rate: float = 0.02  # step of the slow critic towards the critic
    return_rate: float = 0.01  # step of the return percentiles

    @property
    def dims(self) -> dict:
        """The row of SIZES with the overrides applied."""
        row = dict(zip(SIZE_NAMES, SIZES[self.size]))
        return {name: getattr(self, name) or size for name, size in row.items()}

    @property
    def updates_per_step(self) -> float:
        return self.train_ratio / (self.batch_size * self.batch_length)

    def __post_init__(self):
        for names, low, high in (
            ("total_timesteps num_envs log_every save_every eval_episodes batch_size", 1, math.inf),
            ("action_repeat batch_length learning_starts horizon", 1, math.inf),
            ("deter hidden stoch classes units layers blocks", 1, math.inf),
            ("imag_last anneal_steps warmup learning_rate train_ratio ent_coef", 0, math.inf),
            ("free_nats rec_scale dyn_scale rep_scale replay_value_scale", 0, math.inf),
            ("seed", 0, 2**63 - 1),
            ("gamma lam policy_unimix slow_rate return_rate final_lr_fraction", 0, 1),
        ):
            for name in names.split():
                value, option = getattr(self, name), "--" + name.replace("_", "-")
                if value is not None and not low <= value <= high:
                    raise UsageError(f"{option} {value} must be between {low} and {high}")
        if self.size not in SIZES:
            raise UsageError(f"--size {self.size}: choose one of {', '.join(SIZES)}")
        if self.dims["deter"] % self.dims["blocks"]:
            raise UsageError(f"--deter must be a multiple of the {self.dims['blocks']} --blocks")
        if self.num_bins < 3 or self.num_bins % 2 == 0:
            raise UsageError("--num-bins must be odd and at least 3, so that one bin is exactly 0")
        if self.imag_last > self.batch_length:
            raise UsageError(f"--imag-last must be at most --batch-length {self.batch_length}")
        if self.replay_capacity < self.num_envs * (self.batch_length + 1):
            raise UsageError(
                f"--replay-capacity {self.replay_capacity} cannot hold --batch-length + 1 = "
                f"{self.batch_length + 1} steps of each of {self.num_envs} environments"
            )
        if self.total_timesteps <= self.learning_starts + self.num_envs:
            raise UsageError(
                f"--total-timesteps {self.total_timesteps} end before training starts "
                f"(--learning-starts {self.learning_starts})"
            )


class UsageError(Exception):
    """Something the user can fix: printed as one line, exit code 2."""


class TrainingError(Exception):
    """Something that broke while running: its cause is printed, exit code 1."""


# ------------------------------------------------------------------------------------- environments


def resolve_env_id(env_id: str) -> str:
    """The id that will really run: a retired version is moved to the newest registered one."""
    module, _, name = env_id.rpartition(":")
    module = "ale_py" if name.startswith("ALE/") else module
    try:
        if module:
            importlib.import_module(module)  # registers its environments
        namespace, base, version = gym.envs.registration.parse_env_id(name)
    except (ImportError, gym.error.Error) as error:
        hint = " (pip install -r requirements.txt)" if module == "ale_py" else ""
        raise UsageError(f"--env-id {env_id}: {first_line(error)}{hint}") from None
    newest = gym.envs.registration.find_highest_version(namespace, base)
    if name in gym.registry:
        return env_id
    if newest is not None and (version or 0) < newest:
        renamed = env_id.removesuffix(f"-v{version}") + f"-v{newest}"
        print(f"{env_id} is retired, {renamed} takes its place", file=sys.stderr)
        return renamed
    close = difflib.get_close_matches(name, gym.registry, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(f"--env-id {env_id}: no such environment{hint}")


def make_env(env_id: str, render_mode: str | None = None) -> gym.Env:
    """gym.make, plus what the observation space needs: anything but a vector is flattened."""
    options = {"render_mode": render_mode} if render_mode else {}  # some take no such argument
    try:
        env = gym.make(env_id, disable_env_checker=True, **options)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise UsageError(f"--env-id {env_id}: {first_line(error)}") from None
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) == 0:
        env = gym.wrappers.FlattenObservation(env)
    if len(env.observation_space.shape or ()) != 1:
        kind = f"{type(space).__name__} observations of shape {space.shape}"
        raise UsageError(f"--env-id {env_id}: {kind}, need a vector")
    if env.spec and env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 5_000)  # an evaluation has to end
    ActionSpec(env.action_space)  # refuses what it cannot choose
    return gym.wrappers.RecordEpisodeStatistics(env)


class RepeatAction(gym.Wrapper):
    """One step of the agent is `times` of the environment: rewards add up, an end is an end."""

    def __init__(self, env, times: int):
        super().__init__(env)
        self.times = times

    def step(self, action):
        total = 0.0
        for _ in range(self.times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def make_envs(env_id: str, num_envs: int, action_repeat: int) -> SyncVectorEnv:
    """num_envs copies; the observation after an episode's end is the next episode's first one."""
    makers = [lambda: RepeatAction(make_env(env_id), action_repeat)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def make_seeds(words: list[int], num_envs: int) -> list[int]:
    """One seed per environment; other words give other seeds."""
    return np.random.SeedSequence(words).generate_state(num_envs).tolist()


class ActionSpec:
    """The agent's actions, one-hots side by side or reals in [-1, 1], and the environment's."""

    def __init__(self, space):
        self.space, self.nvec = space, None
        if isinstance(space, gym.spaces.Discrete):
            self.nvec, self.start = (int(space.n),), int(space.start)
        elif isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1:
            self.nvec, self.start = tuple(int(n) for n in space.nvec), space.start
        elif not (isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)):
            raise UsageError(f"no way to choose {type(space).__name__} actions")
        self.dim = sum(self.nvec) if self.nvec else int(np.prod(space.shape))

    def to_env(self, action):
        """[N, dim] tensor -> what `envs.step` takes. Reals are clipped here and nowhere else."""
        if self.nvec is None:
            low = np.where(np.isfinite(self.space.low), self.space.low, -1)
            high = np.where(np.isfinite(self.space.high), self.space.high, 1)
            action = action.clamp(-1, 1).numpy().reshape(-1, *self.space.shape)
            return (low + (action + 1) / 2 * (high - low)).astype(self.space.dtype)
        indices = torch.stack([part.argmax(-1) for part in action.split(self.nvec, -1)], -1).numpy()
        single = isinstance(self.space, gym.spaces.Discrete)
        return (indices[:, 0] if single else indices) + self.start


# -------------------------------------------------------------------------------- the mathematics
# [H+1, B, ...] is an imagined trajectory of states 0..H from B starts; rewards and values are raw.


def symlog(x):
    """sign(x) log(1 + |x|): squashes large observations."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x):
    """Inverse of symlog."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def twohot_bins(num_bins=255):
    """[num_bins], odd, exponentially spaced over +-4.9e8, an exact mirror image around 0."""
    negative = symexp(torch.linspace(-20, 0, num_bins // 2 + 1, dtype=torch.float64))
    return torch.cat([negative, -negative[:-1].flip(0)])


def twohot_log_prob(log_probs, target, bins):
    """The two bins' log-probabilities, weighted by their share. [..., num_bins], [...] -> [...]"""
    target = target.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, target.contiguous(), right=True).clamp(1, len(bins) - 1)
    share = (target - bins[above - 1]) / (bins[above] - bins[above - 1])
    pair = log_probs.gather(-1, torch.stack([above - 1, above], -1))
    return (1 - share) * pair[..., 0] + share * pair[..., 1]


def twohot_loss(logits, target, bins):
    """Cross-entropy with targets [...] shared by the two bins around. [..., num_bins] -> [...]"""
    return -twohot_log_prob(F.log_softmax(logits, -1), target, bins)


def twohot_mean(logits, bins):
    """Sum of p_i b_i by mirrored pairs, so that equal ones cancel. [..., num_bins] -> [...]"""
    half = len(bins) // 2
    probs = F.softmax(logits, -1)
    return (probs[..., half + 1 :] - probs[..., :half].flip(-1)) @ bins[half + 1 :]


def unimix_probs(logits, amount=0.01):
    """(1 - amount) softmax(logits) + amount / K, [..., K] -> [..., K].

    Written out, since softmax is slow over a small last dimension and copies RSSM's strided logits.
    """
    weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return (1 - amount) * (weights / weights.sum(-1, keepdim=True)) + amount / logits.shape[-1]


def unimix(logits, amount=0.01):
    """Log-probabilities: the logarithm of unimix_probs. [..., K] -> [..., K]"""
    return torch.log(unimix_probs(logits, amount))


def kl_losses(post_logits, prior_logits, free_nats=1.0):
    """KL(sg(post) || prior) and KL(post || sg(prior)), [...] each, from unmixed logits [..., S, K].

    Summed over the S latents first, then kept above free_nats: below, the gradient is exactly zero.
    """
    post, prior = unimix(post_logits), unimix(prior_logits)

    def divergence(post, prior):
        return (post.exp() * (post - prior)).sum((-2, -1)).clamp(min=free_nats)

    return divergence(post.detach(), prior), divergence(post, prior.detach())


def lambda_return(rewards, continues, values, lam):
    """R_t = r_{t+1} + c_{t+1} ((1 - lam) v_{t+1} + lam R_{t+1}), R_H = v_H. [H+1, B] -> [H, B]

    Entry t belongs to state t: the reward that arrives with it, the probability of going on from it
    (the discount inside), its value. A tensor lam [H+1, B] is 0 where the chain of returns is cut.
    """
    lam = torch.as_tensor(lam, dtype=values.dtype, device=values.device).expand_as(values)
    returns, result = values[-1], []
    for t in reversed(range(1, len(values))):
        returns = rewards[t] + continues[t] * ((1 - lam[t]) * values[t] + lam[t] * returns)
        result.append(returns)
    return torch.stack(result[::-1])


class ReturnNormalizer(nn.Module):
    """Range of the returns from running percentiles, which start at 0 and are not debiased."""

    def __init__(self, rate=0.01, low=0.05, high=0.95, limit=1.0):
        super().__init__()
        self.rate, self.low, self.high, self.limit = rate, low, high, limit
        self.register_buffer("running_low", torch.zeros(()))
        self.register_buffer("running_high", torch.zeros(()))

    @torch.no_grad()
    def update(self, returns):
        """Moves both percentiles by `rate` towards those of all these returns, unweighted."""
        levels = torch.tensor([self.low, self.high], dtype=returns.dtype, device=returns.device)
        low, high = torch.quantile(returns.flatten(), levels)
        self.running_low.lerp_(low.to(self.running_low.dtype), self.rate)
        self.running_high.lerp_(high.to(self.running_high.dtype), self.rate)

    @property
    def scale(self):
        return (self.running_high - self.running_low).clamp(min=self.limit)


@torch.no_grad()
def imagination_weights(continues):
    """w_t = c_0 c_1 ... c_t, [H+1, B] -> [H+1, B]; c_0 silences what follows a terminal start."""
    return torch.cumprod(continues, 0)


def actor_loss(
    log_probs, entropies, returns, values, scale, weights, ent_coef, advantage="return-scaled"
):
    """-mean(w_t (log pi(a_t|s_t) sg(A_t) + ent_coef H[pi(.|s_t)])), to minimise. Arrays: [H, B]."""
    with torch.no_grad():
        if advantage == "return-scaled":  # the algorithm
            advantages = (returns - values) / scale
        elif advantage == "return-only":  # the same expected gradient, more variance
            advantages = returns / scale
        else:  # advantage-scaled: always of size one, however little there is to gain
            advantages = (returns - values) / ((returns - values).std(correction=0) + 1e-8)
    return -(weights.detach() * (log_probs * advantages + ent_coef * entropies)).mean()


def critic_loss(logits, returns, slow_values, weights, bins):
    """mean(w_t (CE(v_t, R_t) + CE(v_t, slow_t))); logits [H, B, num_bins], the rest [H, B].

    slow_t is the value that a slowly following copy of the critic predicts: it only steadies the
    critic, returns and baseline come from the critic itself.
    """
    log_probs = F.log_softmax(logits, -1)  # once for both targets: with 255 bins it takes a while
    targets = returns.detach(), slow_values.detach()
    scores = sum(twohot_log_prob(log_probs, target, bins) for target in targets)
    return -(weights.detach() * scores).mean()


def replay_critic_loss(
    logits, rewards, is_terminal, is_last, bootstrap, slow_values, gamma, lam, bins
):
    """critic_loss on replayed states, [T, B, ...]; bootstrap_t is the imagined return from state t.

    A termination removes the future. Any episode end cuts the chain of returns: a time limit
    bootstraps from the last state, and nothing leaks over from the next episode.
    """
    returns = lambda_return(rewards, gamma * (1 - is_terminal), bootstrap, lam * (1 - is_last))
    return critic_loss(logits[:-1], returns, slow_values[:-1], 1 - is_last[:-1], bins)


def continue_loss(logits, is_terminal, gamma):
    """Cross-entropy with (1 - terminated) gamma as target: a time limit is no end."""
    return F.binary_cross_entropy_with_logits(logits, gamma * (1 - is_terminal), reduction="none")


def gru_update(reset, candidate, update, deter):
    """u tanh(sigmoid(reset) candidate) + (1 - u) deter, where u = sigmoid(update - 1).

    tanh(x) is written 2 sigmoid(2x) - 1, which takes a third of the time on a CPU.
    """
    proposal = torch.sigmoid(2 * torch.sigmoid(reset) * candidate) * 2 - 1
    return torch.lerp(deter, proposal, torch.sigmoid(update - 1))


def squash_action(action):
    """a / max(1, |a|): the world model sees a sample out of range as the environment does."""
    return action / action.detach().abs().clamp(min=1)


def sample_onehot(probs):
    """One-hot samples, [..., K] -> [..., K]; 8 times faster than with Gumbel noise."""
    uniform = torch.rand_like(probs[..., :1])
    reached = (probs.cumsum(-1)[..., :-1] <= uniform).to(probs.dtype)
    below = F.pad(reached, (1, 0), value=1.0)
    return below - F.pad(reached, (0, 1))


def straight_through(probs):
    """A one-hot sample whose gradient is that of the probabilities; the bracket is exactly zero."""
    return sample_onehot(probs.detach()) + (probs - probs.detach())


# ----------------------------------------------------------------------------------------- networks


@torch.no_grad()
def init_weights(weight, fan_in, scale=1.0):
    """Truncated normal, cut at two sigma, of deviation scale / sqrt(fan_in) after the cut."""
    sigma = 1.1368 / math.sqrt(fan_in)
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma).mul_(scale)


def linear(in_dim, out_dim, scale=1.0, bias=True, fan_in=None):
    """A linear layer with the initialisation above."""
    layer = nn.Linear(in_dim, out_dim, bias)
    init_weights(layer.weight, fan_in or in_dim, scale)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def norm_silu(dim):
    """x / sqrt(mean(x^2) + 1e-4) * learned scale, then SiLU."""
    return nn.Sequential(nn.RMSNorm(dim, eps=1e-4), nn.SiLU())


def dense(in_dim, units, layers, out_dim=None, out_scale=1.0):
    """layers x [linear, norm, SiLU], then optionally a linear output."""
    dims = [in_dim] + [units] * layers
    modules = [m for a, b in itertools.pairwise(dims) for m in (linear(a, b), norm_silu(b))]
    return nn.Sequential(*modules, *([linear(dims[-1], out_dim, out_scale)] if out_dim else []))


class BlockLinear(nn.Module):
    """Linear with block-diagonal weights. [..., in_dim] -> [..., blocks, out_dim / blocks]"""

    def __init__(self, in_dim, out_dim, blocks, fan_in=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, in_dim // blocks, out_dim // blocks))
        self.bias = nn.Parameter(torch.zeros(blocks, out_dim // blocks))
        init_weights(self.weight, fan_in or in_dim)  # the full width, as in the official code

    def forward(self, x):
        blocks, in_dim, out_dim = self.weight.shape
        if blocks == 1:
            return F.linear(x, self.weight[0].t(), self.bias[0]).unsqueeze(-2)
        x_blocks = x.reshape(-1, blocks, in_dim).transpose(0, 1)
        out = torch.baddbmm(self.bias.unsqueeze(1), x_blocks, self.weight)
        return out.transpose(0, 1).view(*x.shape[:-1], blocks, out_dim)


class RSSM(nn.Module):
    """Recurrent state-space model. Its state is deter [.., D] and stoch [.., K*S], S one-hots of K.

    K comes before S in memory: sums over K are then sums of vectors, 10 times faster than over
    a short last dimension.
    """

    def __init__(self, deter, hidden, stoch, classes, blocks, token_dim, action_dim, **_):
        super().__init__()
        self.stoch, self.classes, self.blocks = stoch, classes, blocks
        self.sizes = deter, stoch * classes  # of the two parts of the state
        self.in_deter = dense(deter, hidden, 1)
        self.in_stoch = dense(stoch * classes, hidden, 1)
        self.in_action = dense(action_dim, hidden, 1)
        # Each block sees its part of deter and all of the inputs; the latter is one product for all
        fan_in = deter + 3 * hidden * blocks
        self.mix_deter = BlockLinear(deter, deter, blocks, fan_in)
        self.mix_inputs = linear(3 * hidden, deter, bias=False, fan_in=fan_in)
        self.mix_norm = norm_silu(deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks)
        self.prior = dense(deter, hidden, 2, stoch * classes)
        self.post_deter = linear(deter, hidden, fan_in=deter + token_dim)
        self.post_tokens = linear(token_dim, hidden, bias=False, fan_in=deter + token_dim)
        self.post_out = nn.Sequential(norm_silu(hidden), linear(hidden, stoch * classes))

    def initial(self, *batch):
        """The zero state."""
        device = self.gates.bias.device
        return tuple(torch.zeros(*batch, size, device=device) for size in self.sizes)

    def latents(self, logits):
        """[.., K*S] -> a view [.., S, K]."""
        return logits.unflatten(-1, (self.classes, self.stoch)).transpose(-1, -2)

    def sample(self, logits):
        """A straight-through sample of unmixed logits [.., K*S]."""
        return straight_through(unimix_probs(self.latents(logits))).transpose(-1, -2).flatten(-2)

    def core(self, deter, stoch, action_features):
        """deter_t from the state at t-1 and in_action(action_{t-1})."""
        inputs = torch.cat([self.in_deter(deter), self.in_stoch(stoch), action_features], -1)
        mixed = self.mix_norm(self.mix_deter(deter).flatten(-2) + self.mix_inputs(inputs))
        gates = self.gates(mixed).unflatten(-1, (3, -1))
        return gru_update(*gates.unbind(-2), deter.unflatten(-1, (self.blocks, -1))).flatten(-2)

    def observe(self, tokens, prev_actions, is_first, deter, stoch):
        """Filters T steps: [T, B, ..] -> deter, stoch, posterior logits, [T, B, ..] each.

        is_first wipes state and previous action before the step: no episode leaks into the next.
        """
        keep = 1 - is_first.unsqueeze(-1)
        action_features = self.in_action(squash_action(prev_actions) * keep)
        token_features = self.post_tokens(tokens)
        steps = []
        for alive, action_feature, token_feature in zip(keep, action_features, token_features):
            deter = self.core(deter * alive, stoch * alive, action_feature)
            logits = self.post_out(self.post_deter(deter) + token_feature)
            stoch = self.sample(logits)
            steps.append((deter, stoch, logits))
        return tuple(torch.stack(parts) for parts in zip(*steps))

    def imagine_step(self, deter, stoch, action):
        """One step without an observation: stoch comes from the prior."""
        deter = self.core(deter, stoch, self.in_action(squash_action(action)))
        return deter, self.sample(self.prior(deter))


class Policy(nn.Module):
    """MLP to logits of one categorical per entry of nvec, or (nvec None) of a normal."""

    def __init__(self, in_dim, units, layers, action_dim, nvec, mix):
        super().__init__()
        self.nvec, self.mix = nvec, mix
        out_dim = action_dim if nvec else 2 * action_dim
        self.net = dense(in_dim, units, layers, out_dim, out_scale=0.01)

    def categoricals(self, feat):
        """Log-probabilities, one tensor [.., n] per action."""
        return [unimix(part, self.mix) for part in self.net(feat).split(self.nvec, -1)]

    def normal(self, feat):
        """Mean in (-1, 1) and standard deviation in (0.1, 1)."""
        mean, std = self.net(feat).chunk(2, -1)
        return torch.tanh(mean), 0.9 * torch.sigmoid(std + 2) + 0.1

    @torch.no_grad()
    def act(self, feat, greedy=False):
        """An action vector [.., action_dim], sampled or the most likely one."""
        if self.nvec is None:
            mean, std = self.normal(feat)
            return mean if greedy else mean + std * torch.randn_like(std)
        parts = self.categoricals(feat)
        if greedy:
            return torch.cat([F.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) for p in parts], -1)
        return torch.cat([sample_onehot(p.exp()) for p in parts], -1)

    def score(self, feat, action):
        """Log-prob of the unclipped action and entropy, summed over its dimensions. [..] each"""
        if self.nvec is None:
            mean, std = self.normal(feat)
            log_scale = std.log() + 0.5 * math.log(2 * math.pi)
            log_prob = -0.5 * ((action - mean) / std).square() - log_scale
            return log_prob.sum(-1), (log_scale + 0.5).sum(-1)
        log_probs = torch.cat(self.categoricals(feat), -1)
        return (log_probs * action).sum(-1), -(log_probs.exp() * log_probs).sum(-1)


class Dreamer(nn.Module):
    """World model, actor and critics."""

    def __init__(self, obs_dim, action_dim, nvec, args):
        super().__init__()
        dims = args.dims
        units, layers = dims["units"], dims["layers"]
        feat_dim = dims["deter"] + dims["stoch"] * dims["classes"]
        self.encoder = dense(obs_dim, units, layers)
        self.rssm = RSSM(**dims, token_dim=units, action_dim=action_dim)
        self.decoder = dense(feat_dim, units, layers, obs_dim)
        self.reward = dense(feat_dim, units, 1, args.num_bins, out_scale=0.0)
        self.cont = dense(feat_dim, units, 1, 1)
        self.policy = Policy(feat_dim, units, layers, action_dim, nvec, args.policy_unimix)
        self.value = dense(feat_dim, units, layers, args.num_bins, out_scale=0.0)
        self.slow_value = copy.deepcopy(self.value).requires_grad_(False)
        self.return_normalizer = ReturnNormalizer(args.return_rate)
        self.register_buffer("bins", twohot_bins(args.num_bins).float(), persistent=False)

    def initial(self, num_envs):
        """What is remembered before an episode: deter, stoch, previous action."""
        action = torch.zeros(num_envs, self.rssm.in_action[0].in_features, device=self.bins.device)
        return *self.rssm.initial(num_envs), action

    @torch.no_grad()
    def act(self, obs, state, is_first, deterministic=False):
        """obs [N, ..], is_first [N] (arrays), state before them -> action [N, A] on the CPU, state.

        The posterior is sampled even if the action is not, as in the official code.
        """
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.bins.device)
        is_first = torch.as_tensor(is_first, dtype=torch.float32, device=self.bins.device)
        deter, stoch, action = state
        steps = self.encoder(symlog(obs))[None], action[None], is_first[None]
        deter, stoch, _ = (part.squeeze(0) for part in self.rssm.observe(*steps, deter, stoch))
        action = self.policy.act(torch.cat([deter, stoch], -1), deterministic)
        return action.cpu(), (deter, stoch, action)


# -------------------------------------------------------------------------------- losses and update


def world_model_loss(agent, batch, args):
    """World model loss, features [T, B, F] with gradient, deter and stoch without, metrics."""
    rssm = agent.rssm
    steps = agent.encoder(symlog(batch["obs"])), batch["prev_action"], batch["is_first"]
    deter, stoch, post = rssm.observe(*steps, batch["deter"], batch["stoch"])
    feat = torch.cat([deter, stoch], -1)
    reconstruction = (agent.decoder(feat) - symlog(batch["obs"])).square().sum(-1)
    dyn, rep = kl_losses(rssm.latents(post), rssm.latents(rssm.prior(deter)), args.free_nats)
    losses = {
        "reconstruction": args.rec_scale * reconstruction,
        "reward": twohot_loss(agent.reward(feat), batch["reward"], agent.bins),
        "continue": continue_loss(agent.cont(feat).squeeze(-1), batch["is_terminal"], args.gamma),
        "dyn": args.dyn_scale * dyn,
        "rep": args.rep_scale * rep,
    }
    losses = {name: loss.mean() for name, loss in losses.items()}
    metrics = {f"world/{name}": loss for name, loss in losses.items()}
    return sum(losses.values()), feat, deter.detach(), stoch.detach(), metrics


@torch.no_grad()
def imagine(agent, deter, stoch, horizon):
    """Rolls the policy out in the model: features [H+1, B, F] of states 0..H, actions [H, B, A]."""
    feats, actions = deter.new_empty(horizon + 1, len(deter), sum(agent.rssm.sizes)), []
    feats[0] = torch.cat([deter, stoch], -1)
    for t in range(horizon):
        actions.append(agent.policy.act(feats[t]))
        deter, stoch = agent.rssm.imagine_step(deter, stoch, actions[t])
        feats[t + 1] = torch.cat([deter, stoch], -1)
    return feats, torch.stack(actions)


def behaviour_loss(agent, feat, deter, stoch, batch, args, measure=False):
    """Loss of actor and critic, and metrics; `measure` adds those of the actor's gradient."""
    T, B = deter.shape[:2]
    last = args.imag_last or T
    starts = deter[-last:].flatten(0, 1), stoch[-last:].flatten(0, 1)
    feats, actions = imagine(agent, *starts, args.horizon)
    with torch.no_grad():
        rewards = twohot_mean(agent.reward(feats), agent.bins)
        continues = torch.sigmoid(agent.cont(feats)).squeeze(-1)
        slow_values = twohot_mean(agent.slow_value(feats[:-1]), agent.bins)
    logits = agent.value(feats)
    values = twohot_mean(logits.detach(), agent.bins)
    returns = lambda_return(rewards, continues, values, args.lam)
    weights = imagination_weights(continues)[:-1]
    agent.return_normalizer.update(returns)
    scale = agent.return_normalizer.scale
    log_probs, entropies = agent.policy.score(feats[:-1], actions)
    parts = (log_probs, entropies, returns, values[:-1], scale, weights)
    policy = actor_loss(*parts, args.ent_coef, args.advantage)
    value = critic_loss(logits[:-1], returns, slow_values, weights, agent.bins)
    bootstrap, replayed = returns[0].view(last, B), {k: v[-last:] for k, v in batch.items()}
    replay_value = replay_critic_loss(
        agent.value(feat[-last:]), replayed["reward"], replayed["is_terminal"], replayed["is_last"],
        bootstrap, slow_values[0].view(last, B), args.gamma, args.lam, agent.bins,
    )
    metrics = {
        "actor/loss": policy, "actor/entropy": entropies.mean(), "actor/return_scale": scale,
        "actor/advantage_abs": ((returns - values[:-1]) / scale).abs().mean(),
        "actor/imagined_reward": rewards[1:].mean(),
        "critic/loss": value, "critic/replay_loss": replay_value, "critic/value": values.mean(),
        "critic/return": returns.mean(),
    }
    if measure:
        metrics |= actor_gradient_norms(agent.policy, parts, args)
    return policy + value + args.replay_value_scale * replay_value, metrics


def actor_gradient_norms(policy, parts, args):
    """Norms of the actor gradient's policy-gradient part and entropy part, and their ratio."""
    without = actor_loss(*parts, 0.0, args.advantage)
    bonus = -args.ent_coef * (parts[-1] * parts[1]).mean()
    norms = []
    for loss in (without, bonus):
        grads = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
        norms.append(torch.stack([grad.norm() for grad in grads]).norm())
    return {
        "actor/policy_grad_norm": norms[0],
        "actor/entropy_grad_norm": norms[1],
        "actor/grad_ratio": norms[0] / (norms[1] + 1e-12),
    }


class LaProp(torch.optim.Optimizer):
    """Momentum of the normalised gradient (Ziyin et al. 2020, arXiv:2002.04839), and clipping.

    A tensor's gradient is cut to `clip` times the tensor's own norm (arXiv:2102.06171).
    """

    def __init__(self, params, lr, clip=0.3, beta1=0.9, beta2=0.999, eps=1e-20):
        defaults = {"lr": lr, "clip": clip, "beta1": beta1, "beta2": beta2, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        """One update of all parameters with list-wise operations."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    zeros = torch.zeros_like(p)
                    self.state[p] = {"step": 0, "momentum": zeros, "square": zeros.clone()}
                self.state[p]["step"] += 1
            step, beta1, beta2 = self.state[params[0]]["step"], group["beta1"], group["beta2"]
            momentum = [self.state[p]["momentum"] for p in params]
            square = [self.state[p]["square"] for p in params]
            limits = torch.stack(torch._foreach_norm(params)).clamp(min=1e-3) * group["clip"]
            clipped = 1 / (torch.stack(torch._foreach_norm(grads)) / limits).clamp(min=1)
            grads = torch._foreach_mul(grads, list(clipped.unbind()))
            torch._foreach_mul_(square, beta2)
            torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
            denominator = torch._foreach_div(square, 1 - beta2**step)
            torch._foreach_sqrt_(denominator)
            torch._foreach_add_(denominator, group["eps"])
            torch._foreach_div_(grads, denominator)
            torch._foreach_lerp_(momentum, grads, 1 - beta1)
            torch._foreach_add_(params, momentum, alpha=-group["lr"] / (1 - beta1**step))


def learning_rate(args, num_updates, global_step):
    """Linear warm-up from 0 over updates, linear fall to final_lr_fraction over anneal_steps."""
    anneal_steps = args.anneal_steps or args.total_timesteps
    fall = 1 - (1 - args.final_lr_fraction) * min(1.0, global_step / anneal_steps)
    return args.learning_rate * min(1.0, num_updates / args.warmup if args.warmup else 1.0) * fall


def train_step(agent, optimizer, replay, args, measure=False):
    """One gradient step on one batch; latents go back to the replay. Returns metrics."""
    batch, index = replay.sample(args.batch_size, args.batch_length)
    model_loss, feat, deter, stoch, model_metrics = world_model_loss(agent, batch, args)
    loss, metrics = behaviour_loss(agent, feat, deter, stoch, batch, args, measure)
    metrics = model_metrics | metrics
    if not (model_loss + loss).isfinite():
        name = next((name for name, value in metrics.items() if not value.isfinite()), "loss")
        raise TrainingError(f"non-finite {name}; the last checkpoint is untouched")
    optimizer.zero_grad()
    (model_loss + loss).backward()
    optimizer.step()
    fast, slow = (list(critic.parameters()) for critic in (agent.value, agent.slow_value))
    torch._foreach_lerp_(slow, fast, args.slow_rate)
    replay.write_back(index, deter, stoch)
    return {name: value.detach() for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------- replay


class Replay:
    """A ring of records per environment.

    Record t: obs, the reward and flags that arrived with it, the action chosen after it, and the
    latent state that the model had there, which sequences start from and training refreshes.
    """

    def __init__(
        self, capacity, num_envs, obs_dim, action_dim, deter, stoch, device="cpu", seed=0
    ):
        self.length, self.device = capacity // num_envs, device
        shapes = {"obs": (obs_dim,), "action": (action_dim,), "deter": (deter,), "stoch": (stoch,)}
        shapes |= dict.fromkeys(("reward", "is_first", "is_last", "is_terminal"), ())
        self.data = {k: torch.zeros(num_envs, self.length, *size) for k, size in shapes.items()}
        self.data["stoch"] = self.data["stoch"].to(torch.uint8)
        self.count = np.zeros(num_envs, np.int64)  # records ever written, per environment
        self.queued = np.zeros(num_envs, np.int64)  # of these, records in sequences put in `fresh`
        self.fresh = deque()  # sequences that were never replayed: (environment, first record)
        self.rng = np.random.default_rng(seed)

    @property
    def num_bytes(self):
        return sum(v.nbytes for v in self.data.values())

    def add(self, envs, **record):
        """One record for each environment index in `envs`; values [len(envs), ..]."""
        slots = torch.from_numpy(self.count[envs] % self.length)
        rows = torch.from_numpy(envs)
        for name, value in record.items():
            self.data[name][rows, slots] = torch.as_tensor(value).to(self.data[name].dtype).cpu()
        self.count[envs] += 1

    def num_windows(self, length):
        """Per environment: sequences of 1 + length records that do not cross the write head."""
        return np.maximum(np.minimum(self.count, self.length) - length, 0)

    def starts(self, batch_size, length):
        """Environments and first records: fresh sequences, each once, then random ones."""
        for env in range(len(self.count)):
            while self.count[env] - self.queued[env] > length:
                self.fresh.append((env, self.queued[env]))
                self.queued[env] += length + 1
        oldest, windows = np.maximum(self.count - self.length, 0), self.num_windows(length)
        chosen = []
        while self.fresh and len(chosen) < batch_size:
            env, first = self.fresh.popleft()
            if first >= oldest[env]:
                chosen.append((env, first))
        ends = windows.cumsum()
        for flat in self.rng.integers(ends[-1], size=batch_size - len(chosen)):
            env = np.searchsorted(ends, flat, side="right")
            chosen.append((env, oldest[env] + flat - (ends[env] - windows[env])))
        return np.array(chosen).T

    def sample(self, batch_size, length):
        """Sequences [T, B, ..], the latent state before them, and the index of their records."""
        env, first = self.starts(batch_size, length)
        slots = torch.from_numpy((first + np.arange(length + 1)[:, None]) % self.length)
        env = torch.from_numpy(env)
        states = {name: self.data[name][env, slots[0]].float() for name in ("deter", "stoch")}
        records = {name: self.data[name][env, slots] for name in self.data.keys() - states.keys()}
        batch = {name: record[1:] for name, record in records.items()}
        batch |= {"prev_action": records["action"][:-1], **states}
        # An episode that was abandoned (a resumed run) ends where the next one starts
        batch["is_last"][:-1] = torch.maximum(batch["is_last"][:-1], batch["is_first"][1:])
        return {name: value.to(self.device) for name, value in batch.items()}, (env, slots[1:])

    def write_back(self, index, deter, stoch):
        """Fresh latents for the replayed records."""
        self.data["deter"][index] = deter.cpu()
        self.data["stoch"][index] = stoch.to(torch.uint8).cpu()


# ------------------------------------------------------------------------------------------- acting


class Actor:
    """Acts in environments, and keeps what the agent remembers of each: latents, last action."""

    def __init__(self, envs, spec, agent, seed_words):
        self.envs, self.spec, self.agent = envs, spec, agent
        self.obs, _ = envs.reset(seed=make_seeds(seed_words, envs.num_envs))
        self.rewards, self.is_first = np.zeros(envs.num_envs), np.ones(envs.num_envs)
        self.state = agent.initial(envs.num_envs)
        self.everyone, self.num_steps = np.arange(envs.num_envs), 0

    def step(self, replay=None, deterministic=False):
        """One step of every environment, recorded in the replay; (return, length) of what ended."""
        action, self.state = self.agent.act(self.obs, self.state, self.is_first, deterministic)
        if replay:
            self.check_finite("observation", self.obs)
            zeros, (deter, stoch, _) = np.zeros(len(self.everyone)), self.state
            replay.add(
                self.everyone, obs=self.obs, reward=self.rewards, is_first=self.is_first,
                is_last=zeros, is_terminal=zeros, action=action, deter=deter, stoch=stoch,
            )
        try:
            result = self.envs.step(self.spec.to_env(action))
        except Exception:
            raise TrainingError(f"an environment failed:\n{traceback.format_exc()}") from None
        self.obs, rewards, terminated, truncated, info = result
        self.num_steps += 1
        self.check_finite("reward", rewards)
        done = terminated | truncated
        self.rewards, self.is_first = np.where(done, 0.0, rewards), done.astype(np.float64)
        if not done.any():
            return []
        ended = np.flatnonzero(done)
        if replay:
            final_obs, zeros = np.stack(list(info["final_obs"][ended])), np.zeros(len(ended))
            self.check_finite("observation", final_obs)
            replay.add(
                ended, obs=final_obs, reward=rewards[ended], is_first=zeros, is_last=zeros + 1,
                is_terminal=terminated[ended], action=0 * action[ended], deter=0 * deter[ended],
                stoch=0 * stoch[ended],
            )  # no sequence starts from the latents of a last record: its next one is a first
        episode = info["final_info"]["episode"]
        return list(zip(episode["r"][ended].tolist(), episode["l"][ended].tolist()))

    def check_finite(self, name, values):
        """Stops at the first value that is not finite, before it spreads. values: [N, ...]"""
        if not np.isfinite(values).all():
            index = int(np.argwhere(~np.isfinite(values))[0, 0])
            raise TrainingError(f"non-finite {name} (environment {index}, step {self.num_steps})")


# ----------------------------------------------------------------------------------------- training

TRAINING, EVALUATION = 0, 1  # words that keep the seeds of their environments apart


def pick_device(name: str) -> torch.device:
    """The device; on the CPU one thread, since more make small networks slower, not faster."""
    try:
        device = torch.device("cpu" if name == "auto" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {first_line(error)}") from None
    if device.type == "cpu":
        torch.set_num_threads(1)
    return device


def build_agent(args: Args) -> Dreamer:
    """A new agent for the environment, on the device asked for."""
    device = pick_device(args.device)  # first: initial weights depend on the number of threads
    env = make_env(args.env_id)
    env.close()
    spec = ActionSpec(env.action_space)
    return Dreamer(env.observation_space.shape[0], spec.dim, spec.nvec, args).to(device)


def restore(agent: nn.Module, checkpoint: dict, path: str):
    """Loads the agent of a checkpoint that must fit the environment and the networks."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{path} does not fit the options given: {reason}") from None


def train(args: Args) -> dict:
    """Trains, saves and evaluates as args say; returns what summary.json holds."""
    args = dataclasses.replace(args, env_id=resolve_env_id(args.env_id))
    resumed = load_checkpoint(args.resume) if args.resume else None
    global_step = resumed["progress"]["global_step"] if resumed else 0
    if global_step >= args.total_timesteps:
        raise UsageError(f"{args.resume} has made {global_step} steps; raise --total-timesteps")
    torch.manual_seed(args.seed)
    agent = build_agent(args)
    optimizer = LaProp([p for p in agent.parameters() if p.requires_grad], args.learning_rate)
    num_updates = 0
    if resumed:
        restore(agent, resumed, args.resume)
        optimizer.load_state_dict(resumed["optimizer"])
        torch.set_rng_state(resumed["rng"])
        num_updates = resumed["num_updates"]
    learning_starts = global_step + args.learning_starts
    # A resumed run starts new episodes, and must not replay the ones that the run began with
    seed_words = [args.seed, TRAINING, global_step]
    with (
        contextlib.closing(make_envs(args.env_id, args.num_envs, args.action_repeat)) as envs,
        Run(args, args.total_timesteps, envs.envs[0].spec.reward_threshold, resumed) as run,
    ):
        spec = ActionSpec(envs.single_action_space)
        sizes = envs.single_observation_space.shape[0], spec.dim, *agent.rssm.sizes
        replay = Replay(args.replay_capacity, args.num_envs, *sizes, agent.bins.device, seed_words)
        actor = Actor(envs, spec, agent, seed_words)
        print(
            f"{sum(p.numel() for p in agent.parameters()):,} parameters, {args.updates_per_step:g} "
            f"updates per action from step {learning_starts:,}, {replay.num_bytes:,} bytes replay"
            + ", which starts empty again" * bool(resumed), file=sys.stderr,
        )
        rows, episodes, owed = [], [], 0.0
        with stop_signals() as stopped:
            while global_step < args.total_timesteps:
                # act
                episodes += actor.step(replay)
                before = global_step
                global_step += args.num_envs * args.action_repeat

                # update
                if global_step > learning_starts and replay.num_windows(args.batch_length).any():
                    owed += args.num_envs * args.updates_per_step
                for _ in range(int(owed)):
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate(args, num_updates, global_step)
                    rows.append(train_step(agent, optimizer, replay, args, measure=not rows))
                    num_updates += 1
                owed %= 1

                # log
                final = global_step >= args.total_timesteps
                iteration = global_step // args.log_every
                if iteration == before // args.log_every and not (final or stopped):
                    continue
                metrics = {
                    key: torch.stack([row[key] for row in rows if key in row]).mean()
                    for key in (rows[0] if rows else ())
                }
                metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                run.log(global_step, episodes, metrics)
                rows, episodes = [], []

                # save
                final = final or bool(stopped)
                if final or iteration % args.save_every == 0:
                    run.save({
                        "agent": agent.state_dict(), "optimizer": optimizer.state_dict(),
                        "rng": torch.get_rng_state(), "num_updates": num_updates,
                    }, final)
                    return_free_memory()
                if stopped and final:  # a signal between the two waits for the next save
                    print(f"stopped; --resume {run.folder / 'last.pt'} continues", file=sys.stderr)
                    raise SystemExit(128 + stopped[0])

        # evaluate
        run.bar.close()
        agent.load_state_dict(load_checkpoint(run.folder / "best.pt")["agent"])
        return run.finish(*evaluate_and_record(agent, args, run.folder / "episode.gif"))


# -------------------------------------------------------------------------------------- evaluation


def evaluate(agent: Dreamer, args: Args, num_episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw returns and lengths of num_episodes episodes, one in each of as many environments."""
    torch.manual_seed(args.seed)  # sampled latents repeat too
    episodes = {}
    envs = make_envs(args.env_id, num_episodes, args.action_repeat)
    with contextlib.closing(envs):
        actor = Actor(envs, ActionSpec(envs.single_action_space), agent, [args.seed, EVALUATION])
        while len(episodes) < num_episodes:
            ended = actor.step(deterministic=args.deterministic)
            for index, episode in zip(np.flatnonzero(actor.is_first), ended):
                episodes.setdefault(index, episode)
    returns, lengths = np.array([episodes[index] for index in range(num_episodes)]).T
    return returns, lengths


def evaluate_and_record(agent: nn.Module, args: Args, gif: Path) -> tuple[dict, str]:
    """Evaluates on fresh seeds and writes the GIF; the result for a file, and as a sentence."""
    returns, lengths = evaluate(agent, args, args.eval_episodes)
    env = make_env(args.env_id)
    env.close()
    spec, state = ActionSpec(env.action_space), agent.initial(1)
    action, num_steps = None, 0

    def act_alone(obs):
        nonlocal state, action, num_steps
        if num_steps % args.action_repeat == 0:
            is_first = np.array([num_steps == 0], float)
            chosen, state = agent.act(np.asarray(obs)[None], state, is_first, args.deterministic)
            action = spec.to_env(chosen)[0]
        num_steps += 1
        return action

    record_gif(args.env_id, args.seed, act_alone, gif)
    evaluation = {
        "eval_return_mean": float(returns.mean()), "eval_return_std": float(returns.std()),
        "eval_episodes": len(returns),
    }
    return evaluation, (
        f"{args.env_id}: {len(returns)} {'greedy' if args.deterministic else 'sampled'} episodes, "
        f"return {returns.mean():.1f} +- {returns.std():.1f}, mean length {lengths.mean():.0f}"
    )


def evaluate_checkpoint(args: Args):
    """--evaluate: plays a saved model; the GIF lies beside it."""
    path = local_file(args.evaluate)
    agent = build_agent(args)
    restore(agent, load_checkpoint(path), path)
    gif = Path(path).with_name("evaluation.gif")
    _, sentence = evaluate_and_record(agent, args, gif)
    print(f"{sentence}\nGIF: {gif}")


# ---------------------------------------------------------------------------------------- plumbing
# From here on nothing is about the algorithm: files, W&B, signals and the command line, much the
# same in all three scripts.


class Run:
    """A run's folder, metrics, checkpoints, W&B run and progress bar, on one clock: global_step.

    `progress` holds what a resumed run must know of the part before it.
    """

    def __init__(self, args, planned_steps: int, reward_threshold, resumed: dict | None):
        check_wandb(args.wandb_mode, args.wandb_project)
        now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # runs may start in the same second
        name = f"{args.env_id}__{SCRIPT}__{args.seed}__{now}"
        folder = Path(args.runs_dir) / re.sub(r"[^A-Za-z0-9_.-]", "-", name)
        self.folder = Path(args.resume).resolve().parent if resumed else folder
        self.folder.mkdir(parents=True, exist_ok=bool(resumed))
        self.progress = resumed["progress"] if resumed else {
            "global_step": 0, "seconds": 0.0, "recent_returns": [], "best_mean": None,
            "solved_step": None, "solved_seconds": None,
        }
        self.config, self.reward_threshold = dataclasses.asdict(args), reward_threshold
        self.process_start = START - self.progress["seconds"]
        self.first_step, self.first_time = self.progress["global_step"], time.perf_counter()
        self.sps, self.printed = 0.0, self.first_time

        write_whole(self.folder / "args.json", json.dumps(self.config, indent=2).encode())
        metrics, rows = self.folder / "metrics.jsonl", []
        if resumed and metrics.exists():  # rows after the checkpoint will be written anew
            rows = metrics.read_text().splitlines(keepends=True)
            rows = [row for row in rows if row.endswith("\n")]  # a kill may have cut the last one
            rows = [row for row in rows if json.loads(row)["global_step"] <= self.first_step]
        write_whole(metrics, "".join(rows).encode())
        self.metrics = metrics.open("a", buffering=1)
        self.wandb = None
        if args.wandb_mode != "disabled":
            # A copied model would else wait for its upload in the home directory
            os.environ.setdefault("WANDB_DATA_DIR", str((self.folder / "wandb").resolve()))
            self.wandb = wandb.init(
                project=args.wandb_project, name=self.folder.name, config=self.config,
                mode=args.wandb_mode, dir=self.folder, id=resumed and resumed["wandb_id"],
                resume="allow" if resumed else None,
                settings=wandb.Settings(silent=True, console="off"),
            )
        preset = preset_name(args.env_id)
        note = " (resumed)" if resumed else f" (preset {preset})" if preset else ""
        print(f"{args.env_id}{note}, seed {args.seed}: {self.folder}", file=sys.stderr)
        self.bar = tqdm(total=planned_steps, initial=self.first_step, unit=" steps",
                        unit_scale=True, disable=None, dynamic_ncols=True)

    def log(self, global_step: int, episodes: list, metrics: dict):
        """Logs one row. episodes: (return, length) of those that ended since the last row."""
        now, progress = time.perf_counter(), self.progress
        self.bar.update(global_step - progress["global_step"])
        progress["global_step"], progress["seconds"] = global_step, now - self.process_start
        if episodes:
            returns, lengths = np.array(episodes).T
            progress["recent_returns"] = [*progress["recent_returns"], *returns.tolist()][-100:]
            metrics["charts/episodic_return"] = returns.mean()
            metrics["charts/episodic_length"] = lengths.mean()
            metrics["charts/return_mean_100"] = self.return_mean()
        full = len(progress["recent_returns"]) == 100
        threshold = math.inf if self.reward_threshold is None else self.reward_threshold
        if full and self.return_mean() >= threshold and progress["solved_step"] is None:
            progress["solved_step"], progress["solved_seconds"] = global_step, progress["seconds"]
        self.sps = (global_step - self.first_step) / (now - self.first_time)
        metrics["charts/SPS"] = self.sps
        metrics = {key: float(value) for key, value in metrics.items()}
        if self.wandb:
            self.wandb.log(metrics, step=global_step)
        row = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.metrics.write(json.dumps({"global_step": global_step, **row}) + "\n")
        text = f"mean return {self.return_mean():.1f}, {self.sps:.0f} steps/s"
        self.bar.set_postfix_str(text, refresh=False)
        if self.bar.disable and now - self.printed > 10:  # no terminal: a line now and then
            self.printed = now
            print(f"step {global_step:,} of {self.bar.total:,}: {text}", file=sys.stderr)

    def return_mean(self) -> float:
        """Mean return of the last 100 training episodes; NaN before the first one has ended."""
        recent = self.progress["recent_returns"]
        return float(np.mean(recent)) if recent else math.nan

    def save(self, state: dict, final: bool):
        """Writes last.pt, and best.pt when the last BEST_OF training episodes were the best."""
        recent, best = self.progress["recent_returns"][-BEST_OF:], self.progress["best_mean"]
        improved = len(recent) == BEST_OF and (best is None or np.mean(recent) >= best)
        if improved:
            self.progress["best_mean"] = float(np.mean(recent))
        state = {"script": SCRIPT, "args": self.config, "progress": self.progress,
                 "wandb_id": self.wandb and self.wandb.id, **state}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        if improved or (final and not (self.folder / "best.pt").exists()):
            write_whole(self.folder / "best.pt", buffer.getvalue())
        write_whole(self.folder / "last.pt", buffer.getvalue())

    def finish(self, evaluation: dict, sentence: str) -> dict:
        """Writes summary.json and the learning curve, gives W&B the model and the GIF."""
        progress = self.progress
        summary = {
            "env_id": self.config["env_id"], "seed": self.config["seed"],
            "global_step": progress["global_step"],
            "seconds": time.perf_counter() - self.process_start, "sps": self.sps,
            "return_mean_100": self.return_mean() if progress["recent_returns"] else None,
            "best_return_mean": progress["best_mean"], **evaluation,
            "solved_step": progress["solved_step"], "solved_seconds": progress["solved_seconds"],
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "gymnasium": gym.__version__, "numpy": np.__version__},
        }
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2).encode())
        plot_learning_curve(self.folder)
        if self.wandb:
            logged = {f"eval/{key.removeprefix('eval_')}": evaluation[key] for key in evaluation}
            if (self.folder / "episode.gif").exists():
                logged["eval/episode"] = wandb.Video(str(self.folder / "episode.gif"))
            self.wandb.log(logged, step=progress["global_step"])
            self.wandb.summary.update(summary)
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", self.folder.name)
            model = wandb.Artifact(name, type="model", metadata=summary)
            model.add_file(str(self.folder / "best.pt"))
            self.wandb.log_artifact(model)
        print(f"{sentence}\nmodel, GIF, curve and numbers: {self.folder}")
        if self.wandb:
            place = os.path.relpath(Path(self.wandb.dir).parent)
            online = self.config["wandb_mode"] == "online"
            local = f"wandb leet {place}, or wandb sync {place}"
            print("W&B:", self.wandb.url if online else local)
        return summary

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.bar.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses once more
            self.metrics.close()


def check_wandb(mode: str, project: str):
    """Refuses before anything is created what W&B would refuse once it is."""
    if re.search(r"[/\\#?%:]", project):
        raise UsageError(f"--wandb-project {project}: W&B allows none of / \\ # ? % : in a name")
    if mode == "online":
        wandb.setup(wandb.Settings(silent=True))
        try:
            wandb.login()
        except wandb.errors.Error as error:
            raise UsageError(f"--wandb-mode online: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def plot_learning_curve(folder: Path):
    """Draws the returns in metrics.jsonl over environment steps."""
    from matplotlib.figure import Figure  # slow to import, and needed only here

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "charts/return_mean_100" in row]
    axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    for key, label, alpha in (
        ("charts/episodic_return", "episodes of one iteration", 0.3),
        ("charts/return_mean_100", "last 100 episodes", 1.0),
    ):
        axes.plot([row["global_step"] for row in rows], [row[key] for row in rows], "C0",
                  alpha=alpha, label=label)
    axes.set(title=folder.name, xlabel="environment steps", ylabel="mean return")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    axes.figure.savefig(image, format="png", dpi=120)
    write_whole(folder / "learning_curve.png", image.getvalue())


def write_whole(path: Path, data: bytes):
    """Writes a file whole or not at all: a full disk or a kill leaves the old one as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def local_file(path: str) -> str:
    """path itself, or where the model of the W&B artifact entity/project/name:alias was put."""
    if os.path.exists(path) or not re.fullmatch(r"[^/:]+/[^/:]+/[^/:]+:[^/:]+", path):
        return path
    try:
        return str(next(Path(wandb.Api().artifact(path).download()).glob("*.pt")))
    except Exception as error:
        raise UsageError(f"{path}: W&B: {first_line(error)} (offline, give a local file)") from None


def load_checkpoint(path: str | Path) -> dict:
    """Reads a checkpoint of this script without running any code that the file might hold."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such checkpoint") from None
    except Exception as error:
        raise UsageError(f"{path}: not a checkpoint ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("script") != SCRIPT or "agent" not in state:
        raise UsageError(f"{path}: not a checkpoint of {SCRIPT}.py")
    return state


def return_free_memory():
    """Gives the system what the C library keeps: gaps between tensors grow to gigabytes."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has the call
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def stop_signals():
    """Yields a list that notes SIGINT and SIGTERM; a second one ends the process at once."""
    received = []

    def note(signum, frame):
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def record_gif(env_id: str, seed: int, act, path: Path):
    """Plays one episode with act(obs) -> action and writes it to path, at the speed it ran."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without looking for a screen
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
    frames, done = [], False
    try:
        with contextlib.closing(make_env(env_id, render_mode="rgb_array")) as env:
            fps = env.metadata.get("render_fps", 30)
            skip = max(1, round(fps / 25))  # 25 frames a second are smooth, 50 twice the file
            obs, _ = env.reset(seed=seed)
            while not done and len(frames) * skip < 60 * fps:  # a minute at most
                frame = Image.fromarray(env.render())
                frame.thumbnail((400, 400))
                frames.append(frame.quantize(64))
                for _ in range(skip):
                    if not done:
                        obs, _, terminated, truncated, _ = env.step(act(obs))
                        done = terminated or truncated
    except Exception as error:  # what cannot be drawn must not cost the run its other results
        print(f"no GIF, since {env_id} cannot be drawn here: {first_line(error)}", file=sys.stderr)
        return
    image = io.BytesIO()
    frames[0].save(image, "GIF", save_all=True, append_images=frames[1:],
                   duration=1000 * skip / fps, loop=0)
    write_whole(path, image.getvalue())


def preset_name(env_id: str) -> str | None:
    """The row of PRESETS that serves this environment, if there is one."""
    name = re.sub(r".*[:/]|-v\d+$", "", env_id)
    return name if name in PRESETS else None


def parse_args(argv=None) -> Args:
    """What the user typed wins over the checkpoint or the preset, and that over the defaults."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--env-id", "--env_id", default=Args.env_id)
    peek.add_argument("--resume")
    peek.add_argument("--evaluate")
    known, _ = peek.parse_known_args(argv)
    preset = preset_name(known.env_id)
    if source := known.resume or known.evaluate:
        defaults = load_checkpoint(local_file(source))["args"]
        defaults |= {"resume": None, "evaluate": None}
    else:
        defaults = {"env_id": known.env_id, **PRESETS.get(preset, {})}
        source = f"preset {preset}" if preset else "no preset"
    try:
        defaults = Args(**defaults)
    except TypeError as error:  # an option that this version does not know
        raise UsageError(f"{source}: {first_line(error)}") from None
    description = f"{__doc__.splitlines()[0]} Defaults: {defaults.env_id}, {source}."
    return tyro.cli(Args, args=argv, default=defaults, description=description)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that all is closed
    try:
        args = parse_args()
        if args.evaluate:
            evaluate_checkpoint(args)
        else:
            train(args)
    except UsageError as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        sys.exit(2)
    except (TrainingError, OSError, wandb.errors.Error) as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
