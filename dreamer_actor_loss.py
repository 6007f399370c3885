"""DreamerV3 (Hafner et al. 2023/2025, https://arxiv.org/abs/2301.04104) in one file, around its actor loss.

    python dreamer_actor_loss.py                              # CartPole-v1 with its preset
    python dreamer_actor_loss.py --env-id Pendulum-v1 --advantage advantage-scaled

The question that named this file: the paper divides the RETURN by S, code divides the ADVANTAGE. Which is right?

    paper   E[ log pi(a|s) sg(R / S) ] + ent_coef H[pi]       code   E[ log pi(a|s) sg((R - V) / S) ] + ...

Both. V does not depend on the action, and E_a[grad log pi(a|s)] = 0, so subtracting V(s)/S leaves the
expected gradient as it is and only lowers its variance (an offset taken from R and V alike cancels outright).
What matters is where S comes from: S = max(1, EMA(95th percentile of R) - EMA(5th percentile of R)), the range
of the RETURNS, never of the advantages. So the gradient shrinks as the critic gets better and (R - V) smaller,
and one ent_coef suits every reward scale: large returns are brought to a range of about one, small ones (sparse
reward) are NOT amplified, so there entropy wins and the policy explores. Dividing by the advantages' own standard
deviation, as most policy-gradient code does, blows noise up to size one when there is nothing to learn; the
expectation is then another one. Compare with --advantage return-scaled | return-only | advantage-scaled and watch
actor/policy_grad_norm, actor/entropy_grad_norm and actor/entropy.

Details that matter: (1) everything is REINFORCE, no gradient passes through the dynamics; (2) the continue head's
target is (1 - terminated) * gamma, so its probability IS the discount; (3) every loss term, entropy included, is
weighted by the probability of getting there, that of the start state included; (4) reward and value heads are
two-hot in raw space over symexp-spaced bins and start at exactly zero; (5) 1% of uniform in every categorical;
(6) one LaProp optimiser with per-tensor gradient clipping for everything.
"""

import copy
import json
import math
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro

SIZES = {  # deter, hidden, stoch, classes, units, layers, blocks; 1m and up are the official ones
    "tiny": (128, 64, 8, 8, 64, 2, 1),
    "small": (192, 192, 12, 12, 192, 2, 1),
    "1m": (512, 64, 32, 4, 64, 3, 8),
    "12m": (2048, 256, 32, 16, 256, 3, 8),
    "25m": (3072, 384, 32, 24, 384, 3, 8),
    "50m": (4096, 512, 32, 32, 512, 3, 8),
    "100m": (6144, 768, 32, 48, 768, 3, 8),
    "200m": (8192, 1024, 32, 64, 1024, 3, 8),
    "400m": (12288, 1536, 32, 96, 1536, 3, 8),
}
PRESETS = {  # options that train an environment well on a CPU; the command line wins over them
    "CartPole-v1": dict(total_timesteps=15_000),
    "Pendulum-v1": dict(total_timesteps=20_000),
    "LunarLander-v3": dict(size="small", total_timesteps=60_000, num_envs=4, batch_length=32, train_ratio=102.4),
}


@dataclass(frozen=True)
class Args:
    # experiment
    env_id: str = "CartPole-v1"  # Gymnasium environment id
    seed: int = 1  # seeds torch, numpy and the environments
    total_timesteps: int = 100_000  # environment steps
    num_envs: int = 1  # environments stepped together
    eval_episodes: int = 20  # episodes of the final evaluation
    log_every: int = 500  # environment steps between two rows of metrics
    device: str = "cpu"  # cpu or cuda
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
    train_ratio: float = 128.0  # replayed steps per environment step; updates per step = this / (batch of steps)
    learning_starts: int = 500  # environment steps before the first update
    replay_capacity: int = 100_000  # steps kept
    learning_rate: float = 1e-3  # official: 4e-5
    final_lr_fraction: float = 0.1  # the rate falls linearly to this fraction of itself (official: 1)
    warmup: int = 200  # updates over which the rate rises from 0 (official: 1000)
    # algorithm: losses
    advantage: str = "return-scaled"  # return-scaled, return-only or advantage-scaled, see the docstring
    horizon: int = 15  # imagined steps
    imag_last: int = 0  # imagine from the last n states of each sequence only, 0: from all
    gamma: float = 1 - 1 / 333  # discount, inside the continue head
    lam: float = 0.95  # mix of n-step returns
    ent_coef: float = 1e-3  # entropy bonus (official: 3e-4)
    policy_unimix: float = 0.01  # uniform part of a discrete policy (paper: 0.01; the official code runs with 0)
    free_nats: float = 1.0  # KL below which the world model's KL losses stop
    dyn_scale: float = 1.0  # weight of KL(sg(posterior) || prior)
    rep_scale: float = 0.1  # weight of KL(posterior || sg(prior))
    replay_value_scale: float = 0.3  # weight of the critic's loss on replayed states
    slow_rate: float = 0.02  # step of the slow critic towards the critic
    return_rate: float = 0.01  # step of the return percentiles

    def __post_init__(self):
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}: choose from {', '.join(SIZES)}")
        if self.advantage not in ("return-scaled", "return-only", "advantage-scaled"):
            raise ValueError(f"unknown advantage {self.advantage!r}")

    @property
    def dims(self):
        """The size table's row with the overrides applied."""
        names = ("deter", "hidden", "stoch", "classes", "units", "layers", "blocks")
        given = (getattr(self, name) for name in names)
        return dict(zip(names, (size if own is None else own for own, size in zip(given, SIZES[self.size]))))

    @property
    def updates_per_step(self):
        return self.train_ratio / (self.batch_size * self.batch_length)


# ----------------------------------------------------------------------------------------------------------------
# Environments


def make_env(env_id):
    """One environment with a flat float observation."""
    env = gym.make(env_id)
    if isinstance(env.observation_space, (gym.spaces.Dict, gym.spaces.Tuple, gym.spaces.Discrete)):
        env = gym.wrappers.FlattenObservation(env)
    if len(env.observation_space.shape) != 1:
        raise ValueError(f"observation space {env.observation_space} is not supported (images: not yet)")
    return gym.wrappers.RecordEpisodeStatistics(env)


def make_vector_env(env_id, num_envs):
    """Same-step autoreset: the observation after an episode's end is the next episode's first one."""
    mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([lambda: make_env(env_id)] * num_envs, autoreset_mode=mode)


class ActionSpec:
    """How the agent's action vector (one-hots side by side, or reals in [-1, 1]) maps to the environment's."""

    def __init__(self, space):
        self.space, self.nvec = space, None
        if isinstance(space, gym.spaces.Discrete):
            self.nvec, self.start = (int(space.n),), int(space.start)
        elif isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1:
            self.nvec, self.start = tuple(int(n) for n in space.nvec), space.start
        elif not (isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)):
            raise ValueError(f"action space {space} is not supported")
        self.dim = sum(self.nvec) if self.nvec else int(np.prod(space.shape))

    def to_env(self, action):
        """[N, dim] tensor -> what `envs.step` takes. Reals are clipped here and nowhere else."""
        if self.nvec is None:
            low = np.where(np.isfinite(self.space.low), self.space.low, -1)
            high = np.where(np.isfinite(self.space.high), self.space.high, 1)
            action = action.clamp(-1, 1).numpy().reshape(-1, *self.space.shape)
            return (low + (action + 1) / 2 * (high - low)).astype(self.space.dtype)
        indices = torch.stack([part.argmax(-1) for part in action.split(self.nvec, -1)], -1).numpy()
        return (indices[:, 0] if isinstance(self.space, gym.spaces.Discrete) else indices) + self.start


# ----------------------------------------------------------------------------------------------------------------
# The mathematics: [H+1, B, ...] is an imagined trajectory of states 0..H from B starts; nats, raw reward units


def symlog(x):
    """sign(x) log(1 + |x|): squashes large observations."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x):
    """Inverse of symlog."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def twohot_bins(num_bins=255):
    """[num_bins] (odd): symexp-spaced from -4.9e8 to 4.9e8; an exact mirror image, so that the middle one is 0."""
    negative = symexp(torch.linspace(-20, 0, num_bins // 2 + 1, dtype=torch.float64))
    return torch.cat([negative, -negative[:-1].flip(0)])


def twohot_loss(logits, target, bins):
    """Cross-entropy of logits [..., num_bins] with target [...] shared linearly by its two neighbouring bins."""
    target = target.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, target.contiguous(), right=True).clamp(1, len(bins) - 1)
    share = (target - bins[above - 1]) / (bins[above] - bins[above - 1])
    pair = logits.gather(-1, torch.stack([above - 1, above], -1))
    return torch.logsumexp(logits, -1) - (1 - share) * pair[..., 0] - share * pair[..., 1]


def twohot_mean(logits, bins):
    """[...]: sum of p_i b_i, taken over mirrored pairs (p_i - p_-i) b_i; left to right float32 would give rubbish."""
    half = len(bins) // 2
    probs = F.softmax(logits, -1)
    return ((probs[..., half + 1 :] - probs[..., :half].flip(-1)) * bins[half + 1 :]).sum(-1)


def unimix(logits, amount=0.01):
    """Log-probabilities of (1 - amount) softmax(logits) + amount / K, same shape: nothing becomes impossible.

    Written out because the memory layout below (classes apart, latents together) makes this 10 times faster
    than a softmax over a small last dimension.
    """
    weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    probs = weights / weights.sum(-1, keepdim=True)
    return torch.log((1 - amount) * probs + amount / logits.shape[-1])


def kl_losses(post_logits, prior_logits, free_nats=1.0):
    """(dyn, rep), [...] each, from unmixed logits [..., S, K]: KL(sg(post) || prior) and KL(post || sg(prior)).

    Both are summed over the S latents first and then kept above free_nats, where the gradient is exactly zero.
    """
    post, prior = unimix(post_logits), unimix(prior_logits)

    def divergence(post, prior):
        return (post.exp() * (post - prior)).sum((-2, -1)).clamp(min=free_nats)

    return divergence(post.detach(), prior), divergence(post, prior.detach())


def lambda_return(rewards, continues, values, lam):
    """R_t = r_{t+1} + c_{t+1} [(1 - lam) v_{t+1} + lam R_{t+1}], R_H = v_H: [H+1, B] each -> [H, B].

    Entry t belongs to state t: the reward that arrives with it, the probability of going on from it (the discount
    inside), its value. lam may be a tensor [H+1, B] too: 0 where the chain of returns is cut.
    """
    lam = torch.as_tensor(lam, dtype=values.dtype, device=values.device).expand_as(values)
    returns, result = values[-1], []
    for t in reversed(range(1, len(values))):
        returns = rewards[t] + continues[t] * ((1 - lam[t]) * values[t] + lam[t] * returns)
        result.append(returns)
    return torch.stack(result[::-1])


class ReturnNormalizer(nn.Module):
    """Range of the returns: running percentiles that start at 0 and are not debiased, so that it grows slowly."""

    def __init__(self, rate=0.01, low=0.05, high=0.95, limit=1.0):
        super().__init__()
        self.rate, self.low, self.high, self.limit = rate, low, high, limit
        self.register_buffer("running_low", torch.zeros(()))
        self.register_buffer("running_high", torch.zeros(()))

    @torch.no_grad()
    def update(self, returns):
        """Moves both percentiles by `rate` towards those of all returns of this batch, unweighted."""
        levels = torch.tensor([self.low, self.high], dtype=returns.dtype, device=returns.device)
        low, high = torch.quantile(returns.flatten(), levels)
        self.running_low.lerp_(low.to(self.running_low.dtype), self.rate)
        self.running_high.lerp_(high.to(self.running_high.dtype), self.rate)

    @property
    def scale(self):
        return (self.running_high - self.running_low).clamp(min=self.limit)


@torch.no_grad()
def imagination_weights(continues):
    """[H+1, B] -> [H+1, B]: w_t = c_0 c_1 ... c_t. With c_0: a terminal start state teaches actor and critic nothing."""
    return torch.cumprod(continues, 0)


def actor_loss(log_probs, entropies, returns, values, scale, weights, ent_coef, advantage="return-scaled"):
    """-mean[ w_t (log pi(a_t|s_t) sg(A_t) + ent_coef H[pi(.|s_t)]) ], a scalar to minimise; arrays are [H, B]."""
    with torch.no_grad():
        if advantage == "return-scaled":  # the algorithm
            advantages = (returns - values) / scale
        elif advantage == "return-only":  # the same expected gradient, more variance
            advantages = returns / scale
        else:  # advantage-scaled: always of size one, however little there is to gain
            advantages = (returns - values) / ((returns - values).std(correction=0) + 1e-8)
    return -(weights.detach() * (log_probs * advantages + ent_coef * entropies)).mean()


def critic_loss(logits, returns, slow_values, weights, bins):
    """mean[ w_t (CE(v_t, R_t) + CE(v_t, slow critic's value)) ]; logits [H, B, num_bins], the rest [H, B]."""
    losses = twohot_loss(logits, returns.detach(), bins) + twohot_loss(logits, slow_values.detach(), bins)
    return (weights.detach() * losses).mean()


def replay_critic_loss(logits, rewards, is_terminal, is_last, bootstrap, slow_values, gamma, lam, bins):
    """The critic's loss on T replayed states, [T, B, ...] each; bootstrap_t is the imagined return from state t.

    A termination removes the future; any episode end (is_last) cuts the chain of returns, so that a time limit
    bootstraps fully from the last state and nothing leaks over from the next episode.
    """
    returns = lambda_return(rewards, gamma * (1 - is_terminal), bootstrap, lam * (1 - is_last))
    return critic_loss(logits[:-1], returns, slow_values[:-1], 1 - is_last[:-1], bins)


def continue_loss(logits, is_terminal, gamma):
    """Cross-entropy with the soft target (1 - terminated) gamma, not 1 - done: a time limit is no end."""
    return F.binary_cross_entropy_with_logits(logits, gamma * (1 - is_terminal), reduction="none")


def gru_update(reset, candidate, update, deter):
    """The recurrent state's gate; the -1 makes it remember at first."""
    update = torch.sigmoid(update - 1)
    return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * deter


def squash_action(action):
    """a / max(1, |a|): out-of-range samples look to the world model like what the environment gets."""
    return action / action.detach().abs().clamp(min=1)


def sample_onehot(probs):
    """One-hot samples, [..., K] like probs, by inverting the cumulative distribution (much faster than argmax tricks)."""
    uniform = torch.rand_like(probs[..., :1])
    reached = (probs.cumsum(-1)[..., :-1] <= uniform).to(probs.dtype)
    below = F.pad(reached, (1, 0), value=1.0)
    return below - F.pad(reached, (0, 1))


def straight_through(probs):
    """A one-hot sample whose gradient is that of the probabilities; the bracket is exactly zero."""
    return sample_onehot(probs.detach()) + (probs - probs.detach())


# ----------------------------------------------------------------------------------------------------------------
# Networks


@torch.no_grad()
def init_weights(weight, fan_in, scale=1.0):
    """Truncated normal, cut at two sigma, with standard deviation scale / sqrt(fan_in) after the cut."""
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


def mlp(in_dim, units, layers, out_dim=None, out_scale=1.0):
    """layers x [linear, norm, SiLU], then optionally a linear output."""
    dims = [in_dim] + [units] * layers
    modules = [m for a, b in zip(dims, dims[1:]) for m in (linear(a, b), norm_silu(b))]
    return nn.Sequential(*modules, *([linear(dims[-1], out_dim, out_scale)] if out_dim else []))


class BlockLinear(nn.Module):
    """Linear layer whose weight matrix is block-diagonal: [..., in_dim] -> [..., blocks, out_dim / blocks]."""

    def __init__(self, in_dim, out_dim, blocks, fan_in=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, in_dim // blocks, out_dim // blocks))
        self.bias = nn.Parameter(torch.zeros(blocks, out_dim // blocks))
        init_weights(self.weight, fan_in or in_dim)  # the full width, as in the official code

    def forward(self, x):
        blocks, in_dim, out_dim = self.weight.shape
        if blocks == 1:
            return (x @ self.weight[0] + self.bias[0]).unsqueeze(-2)
        out = torch.bmm(x.reshape(-1, blocks, in_dim).transpose(0, 1), self.weight).transpose(0, 1) + self.bias
        return out.view(*x.shape[:-1], blocks, out_dim)


class RSSM(nn.Module):
    """Recurrent state-space model. State: deter [.., D] and stoch [.., K*S], one-hots with the classes apart."""

    def __init__(self, deter, hidden, stoch, classes, blocks, token_dim, action_dim, **_):
        super().__init__()
        self.deter, self.stoch, self.classes, self.blocks = deter, stoch, classes, blocks
        self.in_deter = mlp(deter, hidden, 1)
        self.in_stoch = mlp(stoch * classes, hidden, 1)
        self.in_action = mlp(action_dim, hidden, 1)
        # every block sees its share of deter and all inputs: the second part is the same for all, one matmul
        fan_in = deter + 3 * hidden * blocks
        self.mix_deter = BlockLinear(deter, deter, blocks, fan_in)
        self.mix_inputs = linear(3 * hidden, deter, bias=False, fan_in=fan_in)
        self.mix_norm = norm_silu(deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks)
        self.prior = mlp(deter, hidden, 2, stoch * classes)
        self.post_deter = linear(deter, hidden, fan_in=deter + token_dim)
        self.post_tokens = linear(token_dim, hidden, bias=False, fan_in=deter + token_dim)
        self.post_out = nn.Sequential(norm_silu(hidden), linear(hidden, stoch * classes))

    def initial(self, *batch):
        """The zero state."""
        device = self.gates.bias.device
        return torch.zeros(*batch, self.deter, device=device), torch.zeros(*batch, self.stoch * self.classes, device=device)

    def latents(self, logits):
        """[.., K*S] -> a view [.., S, K]."""
        return logits.unflatten(-1, (self.classes, self.stoch)).transpose(-1, -2)

    def sample(self, logits):
        """A straight-through sample of unmixed logits [.., K*S]."""
        return straight_through(unimix(self.latents(logits)).exp()).transpose(-1, -2).flatten(-2)

    def core(self, deter, stoch, action_features):
        """deter_t from the state at t-1 and in_action(action_{t-1})."""
        inputs = torch.cat([self.in_deter(deter), self.in_stoch(stoch), action_features], -1)
        mixed = self.mix_norm(self.mix_deter(deter).flatten(-2) + self.mix_inputs(inputs))
        gates = self.gates(mixed).unflatten(-1, (3, -1))
        return gru_update(*gates.unbind(-2), deter.unflatten(-1, (self.blocks, -1))).flatten(-2)

    def observe(self, tokens, prev_actions, is_first, deter, stoch):
        """Filters T steps: [T, B, ..] -> deter, stoch, posterior logits, [T, B, ..] each. Gradient flows through.

        is_first wipes state and previous action before the step, so nothing of the last episode leaks in.
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
    """MLP whose outputs are logits (one categorical per entry of nvec), or means and deviations (nvec None)."""

    def __init__(self, in_dim, units, layers, action_dim, nvec, mix):
        super().__init__()
        self.nvec, self.mix = nvec, mix
        self.net = mlp(in_dim, units, layers, action_dim if nvec else 2 * action_dim, out_scale=0.01)

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
        """(log-prob of the unclipped action, entropy), [..] each: summed over action dimensions only."""
        if self.nvec is None:
            mean, std = self.normal(feat)
            log_prob = -0.5 * ((action - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
            return log_prob.sum(-1), (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        log_probs = torch.cat(self.categoricals(feat), -1)
        return (log_probs * action).sum(-1), -(log_probs.exp() * log_probs).sum(-1)


class Agent(nn.Module):
    """World model, actor and critics."""

    def __init__(self, obs_dim, action_dim, nvec, args):
        super().__init__()
        dims = args.dims
        units, layers = dims["units"], dims["layers"]
        feat_dim = dims["deter"] + dims["stoch"] * dims["classes"]
        self.encoder = mlp(obs_dim, units, layers)
        self.rssm = RSSM(**dims, token_dim=units, action_dim=action_dim)
        self.decoder = mlp(feat_dim, units, layers, obs_dim)
        self.reward = mlp(feat_dim, units, 1, args.num_bins, out_scale=0.0)
        self.cont = mlp(feat_dim, units, 1, 1)
        self.policy = Policy(feat_dim, units, layers, action_dim, nvec, args.policy_unimix)
        self.value = mlp(feat_dim, units, layers, args.num_bins, out_scale=0.0)
        self.slow_value = copy.deepcopy(self.value).requires_grad_(False)
        self.return_normalizer = ReturnNormalizer(args.return_rate)
        self.register_buffer("bins", twohot_bins(args.num_bins).float(), persistent=False)

    def initial(self, num_envs):
        """State while acting: deter, stoch, previous action."""
        return (*self.rssm.initial(num_envs), torch.zeros(num_envs, self.rssm.in_action[0].in_features, device=self.bins.device))

    @torch.no_grad()
    def act(self, obs, state, is_first, greedy=False):
        """obs [N, ..] and the state before it -> action [N, action_dim], state. The posterior is sampled, always."""
        deter, stoch, prev_action = state
        tokens = self.encoder(symlog(obs))
        deter, stoch, _ = self.rssm.observe(tokens[None], prev_action[None], is_first[None], deter, stoch)
        action = self.policy.act(torch.cat([deter[0], stoch[0]], -1), greedy)
        return action, (deter[0], stoch[0], action)


# ----------------------------------------------------------------------------------------------------------------
# Losses and update


def world_model_loss(agent, batch, args):
    """Loss of the world model, features [T, B, F] with gradient, the states to imagine from, and metrics."""
    rssm = agent.rssm
    deter, stoch, post = rssm.observe(
        agent.encoder(symlog(batch["obs"])), batch["prev_action"], batch["is_first"], batch["deter"], batch["stoch"]
    )
    feat = torch.cat([deter, stoch], -1)
    dyn, rep = kl_losses(rssm.latents(post), rssm.latents(rssm.prior(deter)), args.free_nats)
    losses = {
        "reconstruction": (agent.decoder(feat) - symlog(batch["obs"])).square().sum(-1),
        "reward": twohot_loss(agent.reward(feat), batch["reward"], agent.bins),
        "continue": continue_loss(agent.cont(feat).squeeze(-1), batch["is_terminal"], args.gamma),
        "dyn": args.dyn_scale * dyn,
        "rep": args.rep_scale * rep,
    }
    losses = {name: loss.mean() for name, loss in losses.items()}
    return sum(losses.values()), feat, deter.detach(), stoch.detach(), {f"world/{k}": v for k, v in losses.items()}


@torch.no_grad()
def imagine(agent, deter, stoch, horizon):
    """Rolls the policy out in the model: features [H+1, B, F] of states 0..H, actions [H, B, A]."""
    feats, actions = [torch.cat([deter, stoch], -1)], []
    for _ in range(horizon):
        actions.append(agent.policy.act(feats[-1]))
        deter, stoch = agent.rssm.imagine_step(deter, stoch, actions[-1])
        feats.append(torch.cat([deter, stoch], -1))
    return torch.stack(feats), torch.stack(actions)


def behaviour_loss(agent, feat, deter, stoch, batch, args, measure=False):
    """Loss of actor and critic, and metrics; `measure` adds the norms of the two parts of the actor's gradient."""
    T, B = deter.shape[:2]
    last = args.imag_last or T
    feats, actions = imagine(agent, deter[-last:].flatten(0, 1), stoch[-last:].flatten(0, 1), args.horizon)
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
        agent.value(feat[-last:]), replayed["reward"], replayed["is_terminal"], replayed["is_last"], bootstrap,
        slow_values[0].view(last, B), args.gamma, args.lam, agent.bins,
    )  # fmt: skip
    metrics = {
        "actor/loss": policy, "actor/entropy": entropies.mean(), "actor/return_scale": scale,
        "actor/advantage_abs": ((returns - values[:-1]) / scale).abs().mean(), "actor/imagined_reward": rewards[1:].mean(),
        "critic/loss": value, "critic/replay_loss": replay_value, "critic/value": values.mean(),
        "critic/return": returns.mean(),
    }  # fmt: skip
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
    """LaProp (Ziyin et al. 2020: momentum of the normalised gradient) after adaptive gradient clipping.

    Each tensor's gradient is first scaled down to at most `clip` times the tensor's own norm (Brock et al. 2021).
    """

    def __init__(self, params, lr, clip=0.3, beta1=0.9, beta2=0.999, eps=1e-20):
        super().__init__(params, dict(lr=lr, clip=clip, beta1=beta1, beta2=beta2, eps=eps))

    @torch.no_grad()
    def step(self):
        """One update of all parameters with list-wise operations."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"step": 0, "momentum": torch.zeros_like(p), "square": torch.zeros_like(p)}
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
    """Linear warm-up from 0 over updates, linear fall to final_lr_fraction over environment steps."""
    fall = 1 - (1 - args.final_lr_fraction) * min(1.0, global_step / args.total_timesteps)
    return args.learning_rate * min(1.0, num_updates / args.warmup if args.warmup else 1.0) * fall


def update(agent, optimizer, replay, args, measure=False):
    """Sample, one loss, one backward, step, slow critic, latents back to the replay. Returns metrics (tensors)."""
    batch, index = replay.sample(args.batch_size, args.batch_length)
    model_loss, feat, deter, stoch, model_metrics = world_model_loss(agent, batch, args)
    loss, metrics = behaviour_loss(agent, feat, deter, stoch, batch, args, measure)
    optimizer.zero_grad()
    (model_loss + loss).backward()
    optimizer.step()
    torch._foreach_lerp_(list(agent.slow_value.parameters()), list(agent.value.parameters()), args.slow_rate)
    replay.write_back(index, deter, stoch)
    return {k: v.detach() for k, v in (model_metrics | metrics).items()}


# ----------------------------------------------------------------------------------------------------------------
# Replay


class Replay:
    """Ring buffer per environment. Record t: obs, the reward and flags that arrived with it, the action chosen after
    it, and the latent state the model had there, which starts a replayed sequence and is refreshed by training."""

    def __init__(self, capacity, num_envs, obs_dim, action_dim, deter, stoch, device="cpu", seed=0):
        self.length = capacity // num_envs
        shapes = dict(obs=obs_dim, action=action_dim, deter=deter, stoch=stoch, reward=0, is_first=0, is_last=0, is_terminal=0)
        self.data = {k: torch.zeros(num_envs, self.length, *([n] if n else [])) for k, n in shapes.items()}
        self.data["stoch"] = self.data["stoch"].to(torch.uint8)
        self.count = np.zeros(num_envs, np.int64)  # records ever written, per environment
        self.queued = np.zeros(num_envs, np.int64)  # records already handed to the queue of fresh sequences
        self.fresh = deque()
        self.device, self.rng = device, np.random.default_rng(seed)

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
        """Sequences of `length` records (plus the one before) that do not cross the write head."""
        return np.maximum(np.minimum(self.count, self.length) - length, 0)

    def starts(self, batch_size, length):
        """Every fresh sequence once, then uniformly random ones: environment and record number of the first record."""
        for env in range(len(self.count)):
            while self.count[env] - self.queued[env] > length:
                self.fresh.append((env, self.queued[env]))
                self.queued[env] += length + 1
        chosen = []
        while self.fresh and len(chosen) < batch_size:
            env, first = self.fresh.popleft()
            if first >= self.count[env] - self.length:
                chosen.append((env, first))
        windows = self.num_windows(length)
        flat = self.rng.integers(windows.sum(), size=batch_size - len(chosen))
        env = np.searchsorted(windows.cumsum(), flat, side="right")
        first = flat - (windows.cumsum() - windows)[env] + np.maximum(self.count - self.length, 0)[env]
        return tuple(np.concatenate([np.array(c, np.int64).reshape(-1), r]) for c, r in zip(zip(*chosen) if chosen else ((), ()), (env, first)))

    def sample(self, batch_size, length):
        """Sequences [T, B, ..] with the latent state before them, and the index to write latents back to."""
        env, first = self.starts(batch_size, length)
        env, slots = torch.from_numpy(env), torch.from_numpy((first + np.arange(length + 1)[:, None]) % self.length)
        records = {k: v[env, slots].to(self.device) for k, v in self.data.items() if k not in ("deter", "stoch")}
        batch = {k: v[1:] for k, v in records.items()}
        batch["prev_action"] = records["action"][:-1]
        batch["is_last"][:-1] = torch.maximum(batch["is_last"][:-1], batch["is_first"][1:])  # abandoned episodes
        batch |= {k: self.data[k][env, slots[0]].to(self.device).float() for k in ("deter", "stoch")}
        return batch, (env, slots[1:])

    def write_back(self, index, deter, stoch):
        """Fresh latents for the replayed records."""
        self.data["deter"][index] = deter.cpu()
        self.data["stoch"][index] = stoch.to(torch.uint8).cpu()


# ----------------------------------------------------------------------------------------------------------------
# Evaluate, train


def evaluate(agent, spec, env_id, episodes, seed, greedy=False):
    """Returns of `episodes` fresh episodes, one per environment."""
    envs = make_vector_env(env_id, episodes)
    obs, _ = envs.reset(seed=seed)
    state, is_first, returns, alive = agent.initial(episodes), np.ones(episodes), np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        device = agent.bins.device
        action, state = agent.act(torch.as_tensor(obs, dtype=torch.float32, device=device), state, torch.as_tensor(is_first, dtype=torch.float32, device=device), greedy)
        obs, reward, terminated, truncated, _ = envs.step(spec.to_env(action.cpu()))
        returns += reward * alive
        is_first = terminated | truncated
        alive &= ~is_first
    envs.close()
    return returns


def train(args):
    start = time.time()
    torch.manual_seed(args.seed)
    envs = make_vector_env(args.env_id, args.num_envs)
    spec = ActionSpec(envs.single_action_space)
    obs_dim = envs.single_observation_space.shape[0]
    agent = Agent(obs_dim, spec.dim, spec.nvec, args).to(args.device)
    optimizer = LaProp([p for p in agent.parameters() if p.requires_grad], args.learning_rate)
    rssm = agent.rssm
    replay = Replay(args.replay_capacity, args.num_envs, obs_dim, spec.dim, rssm.deter, rssm.stoch * rssm.classes, args.device, args.seed)
    print(f"replay {replay.num_bytes / 1e6:.0f} MB, parameters {sum(p.numel() for p in agent.parameters())}", flush=True)
    obs, _ = envs.reset(seed=args.seed)
    state, is_first, reward = agent.initial(args.num_envs), np.ones(args.num_envs), np.zeros(args.num_envs)
    everyone, recent, num_updates, debt, history = np.arange(args.num_envs), deque(maxlen=10), 0, 0.0, []
    best = -np.inf
    for global_step in range(args.num_envs, args.total_timesteps + 1, args.num_envs):
        action, state = agent.act(torch.as_tensor(obs, dtype=torch.float32), state, torch.as_tensor(is_first, dtype=torch.float32))
        zeros = np.zeros(args.num_envs)
        replay.add(everyone, obs=obs, reward=reward, is_first=is_first, is_last=zeros, is_terminal=zeros, action=action, deter=state[0], stoch=state[1])
        obs, reward, terminated, truncated, info = envs.step(spec.to_env(action))
        done = terminated | truncated
        if done.any():
            ended = np.flatnonzero(done)
            nothing = {k: torch.zeros(len(ended), *replay.data[k].shape[2:]) for k in ("action", "deter", "stoch")}
            replay.add(ended, obs=np.stack(list(info["final_obs"][ended])), reward=reward[ended], is_first=np.zeros(len(ended)), is_last=np.ones(len(ended)), is_terminal=terminated[ended], **nothing)
            recent.extend(info["final_info"]["episode"]["r"][ended].tolist())
        reward, is_first = np.where(done, 0.0, reward), done
        if global_step >= args.learning_starts:
            debt += args.num_envs * args.updates_per_step
        while debt >= 1:
            debt -= 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, num_updates, global_step)
            measure = global_step // args.log_every != (global_step - args.num_envs) // args.log_every
            history.append(update(agent, optimizer, replay, args, measure))
            num_updates += 1
        if global_step % args.log_every < args.num_envs and history:
            row = {k: float(torch.stack([h[k] for h in history if k in h]).mean()) for k in history[0] | history[-1]}
            row |= {"step": global_step, "return": float(np.mean(recent)) if recent else None, "seconds": time.time() - start, "updates": num_updates}
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            history = []
    out = {}
    for greedy in (False, True):
        returns = evaluate(agent, spec, args.env_id, args.eval_episodes, 10_000 + args.seed, greedy)
        out["greedy" if greedy else "sampled"] = (float(returns.mean()), float(returns.std()), float(returns.min()))
    print("EVAL", json.dumps(out), "seconds", round(time.time() - start), flush=True)
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = tyro.cli(Args)
    train(tyro.cli(Args, default=replace(Args(), **PRESETS.get(given.env_id, {}), env_id=given.env_id)))
