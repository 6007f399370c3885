"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) in one file.

    python ppo.py --env-id LunarLander-v2          # train, evaluate, save the model and a GIF of it
    python ppo.py --evaluate runs/RUN/best.pt      # play a saved model

One iteration: every environment takes `num_steps` steps with the current policy; generalised advantage
estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16) says how much better each action was than
expected; several epochs of minibatches then raise the clipped surrogate objective (eq. 7 of PPO)

    E[ min(ratio * advantage, clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage) ],
    ratio = pi(action | obs) / pi_old(action | obs).

Details that matter:
- An episode cut by a time limit has not ended: its last step bootstraps from V(final observation).
- Actor and critic are separate networks with separate learning rates, both annealed linearly.
- Rewards are divided by the running standard deviation of the discounted return, so that one set of
  learning rates serves environments of any reward scale. Reported returns are raw.
- Advantages are normalised per minibatch; gradients are clipped by norm, per network.
- Only the actor runs while stepping; values and log-probs of a whole rollout are computed in one batch.
- Environments step in worker processes over shared memory; results do not depend on their number.
"""

import time

START = time.perf_counter()  # before the slow imports, so that a run can tell how long it took in all

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import io
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
import wandb
from PIL import Image
from torch import nn
from tqdm import tqdm

SCRIPT = "ppo"

# What trains well where; anything given on the command line wins over it.
PRESETS = {
    "CartPole": {
        "total_timesteps": 100_000, "num_envs": 16, "num_steps": 64, "num_minibatches": 4,
        "actor_lr": 2e-3, "critic_lr": 4e-3, "gamma": 0.99, "gae_lambda": 0.95,
    },
}


@dataclass(frozen=True)
class Args:
    # experiment
    env_id: str = "LunarLander-v3"  # Gymnasium environment id, `module:Env-v0` for one of your own
    seed: int = 1  # seeds torch and the environments
    total_timesteps: int = 300_000  # environment steps, rounded up to whole iterations
    device: str = "auto"  # cpu, cuda, mps; auto is the CPU, which is faster for small networks
    num_workers: int | None = None  # processes that step environments: 0 = none, default one per core
    runs_dir: str = "runs"  # where the run's folder is created
    save_every: int = 10  # iterations between two checkpoints
    eval_episodes: int = 100  # episodes of the evaluation
    deterministic: bool = True  # evaluate the most likely action instead of a sampled one
    evaluate: str | None = None  # play this checkpoint instead of training
    resume: str | None = None  # continue the run of this checkpoint
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline needs no account
    wandb_project: str = "single-file-rl"  # W&B project
    # algorithm
    num_envs: int = 32  # parallel environments
    num_steps: int = 128  # steps of each environment per iteration
    num_minibatches: int = 8  # gradient steps per epoch
    update_epochs: int = 6  # passes over each rollout
    learning_rate: float | None = None  # sets actor_lr and critic_lr at once
    actor_lr: float = 1.5e-3  # learning rate of the actor
    critic_lr: float = 4e-3  # learning rate of the critic
    anneal_lr: bool = True  # both learning rates fall linearly towards zero
    gamma: float = 0.995  # discount per step
    gae_lambda: float = 0.97  # 0 trusts the critic alone, 1 the sampled rewards alone
    value_target: Literal["gae", "returns"] = "gae"  # advantages + values, or rewards-to-go
    clip_coef: float = 0.2  # how far the ratio may move before its gradient is cut
    clip_value: bool = False  # clip the critic's step in the same way
    norm_adv: bool = True  # normalise advantages per minibatch
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return
    ent_coef: float = 0.005  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # gradients of each network are clipped to this norm
    target_kl: float | None = None  # end the update early once the policy has moved this far
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of actor and critic

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_timesteps / self.batch_size)

    def __post_init__(self):
        for name in "total_timesteps num_envs num_steps num_minibatches update_epochs save_every".split():
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be 1 or more")
        for name in "gamma gae_lambda".split():
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{name.replace('_', '-')} must lie between 0 and 1")
        if self.num_minibatches > self.batch_size:
            raise UsageError(
                f"--num-minibatches {self.num_minibatches} is more than the {self.batch_size} samples "
                f"of a rollout (--num-envs {self.num_envs} x --num-steps {self.num_steps})"
            )


class UsageError(Exception):
    """Something the user can fix: printed as one line, exit code 2."""


class TrainingError(Exception):
    """Something that broke while running: its cause is printed, exit code 1."""


# ----------------------------------------------------------------------------------- environments


def resolve_env_id(env_id: str) -> str:
    """The id that will really run: a retired version is moved to the newest registered one."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        namespace, base, version = gym.envs.registration.parse_env_id(name)
    except (ImportError, gym.error.Error) as error:
        raise UsageError(f"--env-id {env_id}: {error}") from None
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
    try:
        env = gym.make(env_id, render_mode=render_mode, disable_env_checker=True)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UsageError(f"--env-id {env_id}: {error}") from None
    if not isinstance(env.action_space, gym.spaces.Discrete):
        raise UsageError(f"{env_id} has a {type(env.action_space).__name__} action space; need Discrete")
    if start := int(env.action_space.start):
        actions = gym.spaces.Discrete(env.action_space.n)
        env = gym.wrappers.TransformAction(env, lambda action: action + start, actions)
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


def step_environments(make, seeds, arrays, first):
    """Generator that owns environments first, first + 1, ...: next() resets them, then steps them.

    It reads their actions from the shared arrays and writes what came back. Autoreset happens in the
    same step: after an episode's end `obs` is already the next episode's first observation, and
    `final_obs` the last one of the episode that ended.
    """
    envs, index = [], first
    try:
        for index, seed in enumerate(seeds, first):
            envs.append(make())
            arrays["obs"][index], _ = envs[-1].reset(seed=int(seed))
        last = first + len(envs)
        totals, lengths = [0.0] * len(envs), [0] * len(envs)
        while True:
            yield
            actions = arrays["actions"][first:last].tolist()
            for i, (env, action) in enumerate(zip(envs, actions)):
                index = first + i
                obs, reward, terminated, truncated, _ = env.step(action)
                totals[i] += float(reward)
                lengths[i] += 1
                if terminated or truncated:
                    arrays["final_obs"][index] = obs
                    arrays["episode_returns"][index] = totals[i]
                    arrays["episode_lengths"][index] = lengths[i]
                    totals[i], lengths[i] = 0.0, 0
                    obs, _ = env.reset()
                arrays["obs"][index] = obs
                arrays["rewards"][index] = reward
                arrays["terminated"][index] = terminated
                arrays["truncated"][index] = truncated
    except Exception:
        raise TrainingError(f"environment {index} failed:\n{traceback.format_exc()}") from None
    finally:
        for env in envs:
            env.close()


def as_arrays(shared):
    """Numpy views of shared memory blocks, which pickle for a worker process where arrays do not."""
    return {
        name: np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
        for name, (memory, shape, dtype) in shared.items()
    }


def env_worker(connection, others, make, seeds, shared, first):
    """A worker process: steps its environments once per message, ends when the main process does."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main one decides
    for other in others:
        other.close()  # inherited ends would keep the pipes open when the main process is gone
    with contextlib.suppress(EOFError, OSError):
        try:
            for _ in step_environments(make.fn, seeds, as_arrays(shared), first):
                connection.send_bytes(b"")
                connection.recv_bytes()
        except TrainingError as error:
            connection.send_bytes(str(error).encode())


class VectorEnv:
    """N environments in W worker processes (0: in this one), same-step autoreset, one meaning everywhere.

    After `step(actions)`: `rewards`, `terminated`, `truncated` [N] are of the step just made, `obs`
    [N, ...] is what the policy sees next; where an episode ended, `final_obs`, `episode_returns` and
    `episode_lengths` tell how. All of them are views that the next step overwrites.
    """

    def __init__(self, make, seeds, num_workers=0, start_method=None):
        self.workers, self.connections, self.local = [], [], None
        env = make()
        self.observation_space, self.action_space, self.spec = env.observation_space, env.action_space, env.spec
        env.close()
        num_envs, obs_shape = len(seeds), self.observation_space.shape
        layout = {
            "obs": ((num_envs, *obs_shape), np.float32),
            "final_obs": ((num_envs, *obs_shape), np.float32),
            "actions": ((num_envs, *self.action_space.shape), np.int64),
            "rewards": ((num_envs,), np.float32),
            "terminated": ((num_envs,), np.bool_),
            "truncated": ((num_envs,), np.bool_),
            "episode_returns": ((num_envs,), np.float64),
            "episode_lengths": ((num_envs,), np.int64),
        }
        context = multiprocessing.get_context(
            start_method or ("fork" if sys.platform == "linux" else "spawn")
        )
        # Anonymous memory: the system frees it with the last process, however that one ends
        shared = {
            name: (context.RawArray("b", math.prod(shape) * np.dtype(dtype).itemsize), shape, dtype)
            for name, (shape, dtype) in layout.items()
        }
        vars(self).update(as_arrays(shared))
        if num_workers == 0:
            self.local = step_environments(make, seeds, as_arrays(shared), 0)
        for chunk in np.array_split(np.arange(num_envs), num_workers) if num_workers else ():
            ours, theirs = context.Pipe()
            self.connections.append(ours)
            task = (theirs, self.connections, gym.vector.utils.CloudpickleWrapper(make),
                    seeds[chunk[0] : chunk[-1] + 1], shared, chunk[0])
            self.workers.append(context.Process(target=env_worker, args=task, daemon=True))
            self.workers[-1].start()
            theirs.close()
        self._wait()  # for the first observations

    def step(self, actions):
        self.actions[:] = actions
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a dead worker is reported by _wait
                connection.send_bytes(b"")
        self._wait()

    def _wait(self):
        if self.local:
            next(self.local)
        for worker, connection in zip(self.workers, self.connections):
            try:
                failure = connection.recv_bytes()
            except (EOFError, OSError):
                worker.join(1)
                raise TrainingError(f"an environment worker died (exit code {worker.exitcode})") from None
            if failure:
                raise TrainingError(failure.decode())

    def close(self):
        if self.local:
            self.local.close()
        for connection in self.connections:
            connection.close()
        for worker in self.workers:
            worker.join(2)
            worker.kill()  # does nothing unless it hangs in an environment's step
            worker.join()


# --------------------------------------------------------------------------------------- networks


def mlp(inputs: int, hidden_sizes: tuple[int, ...], outputs: int, output_gain: float) -> nn.Sequential:
    """Tanh layers with orthogonal weights; a small output gain makes the first policy near uniform."""
    layers = []
    for width in hidden_sizes:
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, math.sqrt(2))
        inputs = width
    layers.append(nn.Linear(inputs, outputs))
    nn.init.orthogonal_(layers[-1].weight, output_gain)
    for layer in layers[::2]:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class RunningMeanStd(nn.Module):
    """Mean and variance of all samples so far (Chan et al. 1979), as buffers: saved with the agent."""

    def __init__(self, shape=()):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(1e-4))

    def update(self, samples):
        """samples: [..., *shape]."""
        samples = samples.reshape(-1, *self.mean.shape)
        var, mean = torch.var_mean(samples, dim=0, correction=0)
        count, total = len(samples), self.count + len(samples)
        delta = mean - self.mean
        self.var = (self.var * self.count + var * count + delta**2 * self.count * count / total) / total
        self.mean = self.mean + delta * count / total
        self.count = total


class Agent(nn.Module):
    """Actor and critic, separate, and the statistics that the rewards are scaled by."""

    def __init__(self, obs_dim: int, num_actions: int, hidden_sizes: tuple[int, ...]):
        super().__init__()
        self.actor = mlp(obs_dim, hidden_sizes, num_actions, output_gain=0.01)
        self.critic = mlp(obs_dim, hidden_sizes, 1, output_gain=1.0)
        self.return_stats = RunningMeanStd()

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    @torch.no_grad()
    def act(self, obs, deterministic: bool):
        logits = self.actor(obs)
        return logits.argmax(-1) if deterministic else sample(logits, torch.empty_like(logits).exponential_())


# -------------------------------------------------------------------------------- the mathematics


def sample(logits, noise):
    """Categorical samples by the Gumbel trick, from unit exponential noise. [..., A] each -> [...]"""
    return (logits - noise.log()).argmax(-1)


def log_prob_and_entropy(logits, actions):
    """log pi(action | obs) and the policy's entropy in nats. [..., A], [...] -> [...], [...]"""
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy


def compute_returns(rewards, done, bootstrap, gamma):
    """Discounted rewards-to-go. All inputs and the result: [T, N].

    bootstrap[t] is the value of the state that step t led to, zero if that state is terminal; it stands
    for the rewards that are not in the rollout, so it is used only where an episode or the rollout ends.
    """
    returns, following = torch.empty_like(rewards), bootstrap[-1]
    for t in reversed(range(len(rewards))):
        following = torch.where(done[t].bool(), bootstrap[t], following)
        returns[t] = following = rewards[t] + gamma * following
    return returns


def compute_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16). All inputs and the result: [T, N].

    next_values[t] is the value of the state that step t really led to: at an episode's end that is the
    final observation's, not that of the next episode's first. Termination removes the bootstrap; any
    episode end stops the trace.
    """
    delta = rewards + gamma * next_values * (1 - terminated.to(rewards)) - values
    decay = gamma * gae_lambda * (1 - done.to(rewards))
    advantages, advantage = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = delta[t] + decay[t] * advantage
    return advantages


def discounted_sums(rewards, done, carry, gamma):
    """Discounted sum of an episode's rewards up to each step: [T, N], and the carry [N] into the next.

    Its deviation is the scale that rewards are divided by (Engstrom et al. 2020, arXiv:2005.12729).
    """
    sums = torch.empty_like(rewards)
    for t in range(len(rewards)):
        sums[t] = gamma * carry + rewards[t]
        carry = sums[t] * (1 - done[t].to(rewards))
    return sums, carry


def ppo_policy_loss(log_probs, old_log_probs, advantages, clip_coef):
    """Clipped surrogate (Schulman et al. 2017, eq. 7), to minimise. [B] each -> loss, approx_kl, clipfrac.

    approx_kl is the k3 estimator of KL(old || new) (Schulman 2020, joschu.net/blog/kl-approx.html):
    never negative; clipfrac is the share of ratios beyond the clip.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()
        clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return loss, approx_kl, clipfrac


def value_loss(values, old_values, targets, clip_coef=None):
    """Half the mean squared error, [B] each; with clip_coef the pessimistic one of a clipped step."""
    loss = (values - targets) ** 2
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        loss = torch.max(loss, (clipped - targets) ** 2)
    return 0.5 * loss.mean()


def normalize(advantages):
    """Zero mean, unit deviation; zeros where there is no spread. [B] -> [B]"""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


# ------------------------------------------------------------------------------ collect and update


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T + 1, N, ...], the last row is what the policy sees next
    final_obs: torch.Tensor  # [T, N, ...], an episode's last observation where done, else zeros
    actions: torch.Tensor  # [T, N]
    rewards: torch.Tensor  # [T, N], raw
    terminated: torch.Tensor  # [T, N]
    done: torch.Tensor  # [T, N], terminated or truncated: step t ended an episode


class Batch(NamedTuple):  # [T * N] each
    obs: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    targets: torch.Tensor


def check_finite(name: str, values: torch.Tensor):
    """values: [T, N, ...]; stops the run at the cause instead of at a NaN in the weights."""
    if not values.isfinite().all():
        step, index = (~values.isfinite()).nonzero()[0, :2].tolist()
        raise TrainingError(
            f"non-finite {name} from environment {index}, step {step} of the rollout; "
            "nothing was learned from it, the last checkpoint is untouched"
        )


@torch.no_grad()
def collect(agent: Agent, envs: VectorEnv, num_steps: int, device) -> tuple[Rollout, list]:
    """num_steps steps of every environment, and (return, length) of the episodes that ended."""
    num_envs, num_actions, episodes = len(envs.rewards), int(envs.action_space.n), []
    rollout = Rollout(
        obs=torch.empty(num_steps + 1, *envs.obs.shape),
        final_obs=torch.zeros(num_steps, *envs.obs.shape),
        actions=torch.empty(num_steps, num_envs, dtype=torch.int64),
        rewards=torch.empty(num_steps, num_envs),
        terminated=torch.empty(num_steps, num_envs, dtype=torch.bool),
        done=torch.empty(num_steps, num_envs, dtype=torch.bool),
    )
    noise = torch.empty(num_steps, num_envs, num_actions, device=device).exponential_()
    obs, rewards, terminated = map(torch.from_numpy, (envs.obs, envs.rewards, envs.terminated))
    for t in range(num_steps):
        rollout.obs[t] = obs
        rollout.actions[t] = actions = sample(agent.actor(obs.to(device)), noise[t])
        envs.step(actions.cpu().numpy())
        rollout.rewards[t] = rewards
        rollout.terminated[t] = terminated
        done = envs.terminated | envs.truncated
        rollout.done[t] = torch.from_numpy(done)
        if done.any():
            rollout.final_obs[t, done] = torch.from_numpy(envs.final_obs[done])
            episodes += zip(envs.episode_returns[done].tolist(), envs.episode_lengths[done].tolist())
    rollout.obs[num_steps] = obs
    check_finite("observation", rollout.obs)
    check_finite("observation", rollout.final_obs)
    check_finite("reward", rollout.rewards)
    return Rollout(*(field.to(device) for field in rollout)), episodes


@torch.no_grad()
def prepare_batch(agent: Agent, rollout: Rollout, rewards, args: Args) -> Batch:
    """Log-probs, values, advantages and critic targets of a whole rollout, flattened to [T * N]."""
    values = agent.value(rollout.obs)
    next_values = values[1:].clone()
    next_values[rollout.done] = agent.value(rollout.final_obs[rollout.done])
    values = values[:-1]
    advantages = compute_gae(
        rewards, values, next_values, rollout.terminated, rollout.done, args.gamma, args.gae_lambda
    )
    if args.value_target == "gae":
        targets = advantages + values
    else:
        bootstrap = next_values * ~rollout.terminated
        targets = compute_returns(rewards, rollout.done, bootstrap, args.gamma)
    log_probs, _ = log_prob_and_entropy(agent.actor(rollout.obs[:-1]), rollout.actions)
    fields = rollout.obs[:-1], rollout.actions, log_probs, advantages, values, targets
    return Batch(*(field.flatten(0, 1) for field in fields))


def update(agent: Agent, optimizer, batch: Batch, args: Args) -> dict:
    """Epochs of minibatch gradient steps on one rollout; returns means over all minibatches."""
    rows = []
    clip_value = args.clip_coef if args.clip_value else None
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs), device=batch.obs.device)
        # Sizes differ by at most one: a stub of a minibatch would make one wild step
        shuffled = (field[order].tensor_split(args.num_minibatches) for field in batch)
        for minibatch in map(Batch._make, zip(*shuffled)):
            advantages = normalize(minibatch.advantages) if args.norm_adv else minibatch.advantages
            log_probs, entropy = log_prob_and_entropy(agent.actor(minibatch.obs), minibatch.actions)
            policy_loss, approx_kl, clipfrac = ppo_policy_loss(
                log_probs, minibatch.log_probs, advantages, args.clip_coef
            )
            critic_loss = value_loss(
                agent.value(minibatch.obs), minibatch.values, minibatch.targets, clip_value
            )
            optimizer.zero_grad()
            # The networks share no weights, so one backward pass serves both losses
            (policy_loss - args.ent_coef * entropy.mean() + critic_loss).backward()
            norms = (
                nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                for network in (agent.actor, agent.critic)
            )
            row = policy_loss, critic_loss, entropy.mean(), approx_kl, clipfrac, *norms
            rows.append(torch.stack(row).detach())
            optimizer.step()
        epoch_kl = torch.stack(rows[-args.num_minibatches :])[:, 3].mean()
        if args.target_kl is not None and epoch_kl > args.target_kl:
            break
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"]
    names += ["actor_grad_norm", "critic_grad_norm"]
    metrics = {
        f"losses/{name}": value for name, value in zip(names, torch.stack(rows).mean(0).tolist())
    }
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingError(f"non-finite {name}; the last checkpoint is untouched")
    unexplained = (batch.targets - batch.values).var(correction=0)
    explained_variance = 1 - unexplained / batch.targets.var(correction=0)  # NaN: nothing to explain
    return {**metrics, "losses/explained_variance": explained_variance.item()}


# ------------------------------------------------------------------- evaluation, files and logging


def evaluate(agent: Agent, args: Args, num_episodes: int, seed) -> tuple[np.ndarray, np.ndarray]:
    """Raw returns and lengths of num_episodes episodes, the same number in every environment.

    Equal numbers matter: taking the first num_episodes to end would favour short episodes.
    """
    num_envs = max(n for n in range(1, args.num_envs + 1) if num_episodes % n == 0)
    seeds = np.random.SeedSequence(seed).generate_state(num_envs)
    with contextlib.closing(start_envs(args, seeds)) as envs:
        device = next(agent.parameters()).device
        episodes = [[] for _ in range(num_envs)]
        while min(map(len, episodes)) < num_episodes // num_envs:
            obs = torch.from_numpy(envs.obs).to(device)
            envs.step(agent.act(obs, args.deterministic).cpu().numpy())
            for i in np.flatnonzero(envs.terminated | envs.truncated):
                episodes[i].append((envs.episode_returns[i], envs.episode_lengths[i]))
    returns, lengths = np.array([own[: num_episodes // num_envs] for own in episodes]).reshape(-1, 2).T
    return returns, lengths


def record_gif(agent: Agent, args: Args, seed: int, path: Path) -> float:
    """Plays one episode in an environment that renders, writes it to path, returns its return."""
    env = make_env(args.env_id, render_mode="rgb_array")
    device = next(agent.parameters()).device
    fps = env.metadata.get("render_fps", 30)
    skip = max(1, round(fps / 25))  # 25 frames a second are smooth, and half the file of 50
    (obs, _), frames, total = env.reset(seed=seed), [], 0.0
    for step in range(10_000):  # an environment without a time limit must not fill the memory
        if step % skip == 0:
            frame = Image.fromarray(env.render())
            frame.thumbnail((400, 400))
            frames.append(frame.quantize(64))
        action = agent.act(torch.as_tensor(obs, dtype=torch.float32, device=device)[None], args.deterministic)
        obs, reward, terminated, truncated, _ = env.step(action[0].cpu().numpy())
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    with whole_file(path) as temporary:
        frames[0].save(temporary, "GIF", save_all=True, append_images=frames[1:],
                       duration=1000 * skip / fps, loop=0)
    return total


def plot_learning_curve(metrics: Path, title: str, path: Path):
    """Draws the mean return of the last 100 episodes over environment steps."""
    from matplotlib.figure import Figure  # slow to import, and needed only here

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row.get("charts/return_mean_100") is not None]
    axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    axes.plot([row["global_step"] for row in rows], [row["charts/return_mean_100"] for row in rows])
    axes.set(title=title, xlabel="environment steps", ylabel="mean return, last 100 episodes")
    axes.grid(alpha=0.3)
    with whole_file(path) as temporary:
        axes.figure.savefig(temporary, format="png", dpi=120)


@contextlib.contextmanager
def whole_file(path: Path):
    """Yields a temporary name that becomes path if the block succeeds: a file is whole or absent."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path: Path, state: dict):
    """Writes plain types and tensors in one go, so that a full disk leaves the old file whole."""
    buffer = io.BytesIO()
    torch.save({"script": SCRIPT, **state}, buffer)
    with whole_file(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


def load_checkpoint(path: str) -> dict:
    """Reads a checkpoint of this script without running any code that it might hold."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such checkpoint") from None
    except Exception as error:
        raise UsageError(f"{path}: not a checkpoint ({str(error).splitlines()[0]})") from None
    if not isinstance(state, dict) or state.get("script") != SCRIPT:
        raise UsageError(f"{path}: not a checkpoint of {SCRIPT}.py")
    return state


NO_PROGRESS = {
    "global_step": 0, "seconds": 0.0, "recent": [], "best_mean": None,
    "solved_step": None, "solved_seconds": None,
}


class Run:
    """A run's folder, metrics.jsonl, W&B run and progress bar, on one clock: global_step."""

    def __init__(self, args, planned_steps: int, resumed: dict | None):
        if args.wandb_mode == "online" and not wandb.api.api_key:
            raise UsageError("--wandb-mode online needs a key: run `wandb login`, or stay offline")
        name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(args.runs_dir) / re.sub(r"[^A-Za-z0-9_.-]", "-", name)
        self.folder = Path(args.resume).parent if resumed else folder
        self.folder.mkdir(parents=True, exist_ok=bool(resumed))
        step = resumed["progress"]["global_step"] if resumed else 0
        metrics, rows = self.folder / "metrics.jsonl", []
        if resumed and metrics.exists():  # what came after the checkpoint will be logged anew
            rows = [row for row in metrics.read_text().splitlines(keepends=True) if row.endswith("\n")]
            rows = [row for row in rows if json.loads(row)["global_step"] <= step]
        with whole_file(metrics) as temporary:
            temporary.write_text("".join(rows))
        self.metrics = metrics.open("a", buffering=1)
        config = dataclasses.asdict(args)
        (self.folder / "args.json").write_text(json.dumps(config, indent=2))
        self.wandb = None
        if args.wandb_mode != "disabled":
            self.wandb = wandb.init(
                project=args.wandb_project, name=self.folder.name, config=config,
                mode=args.wandb_mode, dir=self.folder, id=resumed and resumed["wandb_id"],
                resume="allow" if resumed else None,
                settings=wandb.Settings(silent=True, console="off"),
            )
        self.wandb_id = self.wandb.id if self.wandb else None
        self.bar = tqdm(total=planned_steps, initial=step, unit=" steps", unit_scale=True,
                        disable=None, dynamic_ncols=True)
        self.step, self.printed = step, time.perf_counter()
        print(f"{args.env_id}, seed {args.seed}: {self.folder}", file=sys.stderr)

    def log(self, global_step: int, metrics: dict):
        """One row for everyone; on a terminal the bar moves, elsewhere a line every ten seconds."""
        row = {key: float(value) for key, value in metrics.items()}
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self.metrics.write(json.dumps({"global_step": global_step, **finite}) + "\n")
        if self.wandb:
            self.wandb.log(row, step=global_step)
        text = f"return {row.get('charts/return_mean_100', math.nan):.1f}, {row['charts/SPS']:.0f}/s"
        self.bar.update(global_step - self.step)
        self.bar.set_postfix_str(text, refresh=False)
        self.step = global_step
        if self.bar.disable and time.perf_counter() - self.printed > 10:
            self.printed = time.perf_counter()
            print(f"step {global_step:,} of {self.bar.total:,}: {text}", file=sys.stderr)

    def finish(self, summary: dict):
        """The curve, summary.json, and the model and GIF as W&B artifact and video."""
        summary = {**summary, "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "gymnasium": gym.__version__, "numpy": np.__version__,
        }}
        plot_learning_curve(self.folder / "metrics.jsonl", self.folder.name, self.folder / "learning_curve.png")
        with whole_file(self.folder / "summary.json") as temporary:
            temporary.write_text(json.dumps(summary, indent=2))
        if self.wandb:
            self.wandb.log({
                "eval/return_mean": summary["eval_return_mean"],
                "eval/return_std": summary["eval_return_std"],
                "eval/episode": wandb.Video(str(self.folder / "episode.gif")),
            }, step=self.step)
            self.wandb.summary.update(summary)
            artifact = wandb.Artifact(self.folder.name, type="model", metadata=summary)
            artifact.add_file(str(self.folder / "best.pt"))
            self.wandb.log_artifact(artifact)
            print(f"W&B: look at it with `wandb leet {self.wandb.dir}/..`, upload it with `wandb sync {self.wandb.dir}/..`")
        print(f"everything is in {self.folder}")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.bar.close()
        self.metrics.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))


@contextlib.contextmanager
def stop_signals():
    """Yields a list that SIGINT and SIGTERM are noted in; the second one ends the process as usual."""
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


# ---------------------------------------------------------------------------------------- training


def choose_device(name: str) -> torch.device:
    """The device; on the CPU one thread, since more make small networks slower, not faster."""
    device = torch.device("cpu" if name == "auto" else name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    return device


def start_envs(args: Args, seeds) -> VectorEnv:
    workers = min(os.cpu_count() if args.num_workers is None else args.num_workers, len(seeds))
    return VectorEnv(functools.partial(make_env, args.env_id), seeds, workers)


def build_agent(args: Args, envs: VectorEnv) -> Agent:
    return Agent(envs.observation_space.shape[0], int(envs.action_space.n), args.hidden_sizes)


def train(args: Args) -> dict:
    """Trains, saves and evaluates as args say; returns what summary.json holds."""
    device = choose_device(args.device)
    args = dataclasses.replace(args, env_id=resolve_env_id(args.env_id))
    resumed = load_checkpoint(args.resume) if args.resume else None
    progress = resumed["progress"] if resumed else dict(NO_PROGRESS)
    if progress["global_step"] >= args.total_timesteps:
        raise UsageError(f"{args.resume} has trained that long already; raise --total-timesteps")
    planned_steps = args.num_iterations * args.batch_size
    torch.manual_seed(args.seed)
    # A resumed run starts new episodes, and must not replay those that it began with
    seeds = np.random.SeedSequence([args.seed, progress["global_step"]]).generate_state(args.num_envs)

    with (
        stop_signals() as stopped,
        contextlib.closing(start_envs(args, seeds)) as envs,
        Run(args, planned_steps, resumed) as run,
    ):
        agent = build_agent(args, envs).to(device)
        optimizer = torch.optim.Adam(
            [{"params": agent.actor.parameters()}, {"params": agent.critic.parameters()}], eps=1e-5
        )
        if resumed:
            agent.load_state_dict(resumed["agent"])
            optimizer.load_state_dict(resumed["optimizer"])
            torch.set_rng_state(resumed["rng"])
        recent = deque(progress["recent"], maxlen=100)  # returns of the last training episodes
        threshold = envs.spec.reward_threshold if envs.spec else None
        first_step, first_time = progress["global_step"], time.perf_counter()
        process_start = START - progress["seconds"]
        discounted = torch.zeros(args.num_envs, device=device)

        for iteration in range(first_step // args.batch_size, args.num_iterations):
            # anneal; the last update still has a rate above zero
            factor = 1 - progress["global_step"] / planned_steps if args.anneal_lr else 1.0
            for group, rate in zip(optimizer.param_groups, (args.actor_lr, args.critic_lr)):
                group["lr"] = factor * (rate if args.learning_rate is None else args.learning_rate)

            # collect
            rollout, episodes = collect(agent, envs, args.num_steps, device)
            progress["global_step"] += args.batch_size

            # advantages
            rewards = rollout.rewards
            if args.norm_reward:
                sums, discounted = discounted_sums(rewards, rollout.done, discounted, args.gamma)
                agent.return_stats.update(sums)
                rewards = rewards / (agent.return_stats.var + 1e-8).sqrt()
            batch = prepare_batch(agent, rollout, rewards, args)

            # update
            metrics = update(agent, optimizer, batch, args)

            # log
            if episodes:
                returns, lengths = np.array(episodes).T
                recent.extend(returns.tolist())
                metrics["charts/episodic_return"] = returns.mean()
                metrics["charts/episodic_length"] = lengths.mean()
                metrics["charts/return_mean_100"] = np.mean(recent)
            now = time.perf_counter()
            metrics["charts/SPS"] = (progress["global_step"] - first_step) / (now - first_time)
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            run.log(progress["global_step"], metrics)
            progress.update(seconds=now - process_start, recent=list(recent))
            full = len(recent) == recent.maxlen
            solved = full and threshold is not None and np.mean(recent) >= threshold
            if solved and progress["solved_step"] is None:
                progress["solved_step"] = progress["global_step"]
                progress["solved_seconds"] = progress["seconds"]

            # save
            last = bool(stopped) or iteration == args.num_iterations - 1
            if last or iteration % args.save_every == 0:
                best, mean = progress["best_mean"], float(np.mean(recent)) if recent else None
                improved = last if best is None and not full else full and mean > (best or -math.inf)
                if improved:
                    progress["best_mean"] = mean
                checkpoint = {
                    "args": dataclasses.asdict(args), "progress": progress, "wandb_id": run.wandb_id,
                    "agent": agent.state_dict(), "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(),
                }
                save_checkpoint(run.folder / "last.pt", checkpoint)
                if improved:
                    save_checkpoint(run.folder / "best.pt", checkpoint)
            if stopped:
                print(f"stopped; continue with --resume {run.folder / 'last.pt'}", file=sys.stderr)
                raise SystemExit(128 + stopped[0])

        # evaluate
        sps = (progress["global_step"] - first_step) / (time.perf_counter() - first_time)
        run.bar.close()
        agent.load_state_dict(load_checkpoint(run.folder / "best.pt")["agent"])
        evaluation = evaluate_and_record(agent, args, run.folder / "episode.gif")
        summary = {
            "env_id": args.env_id, "seed": args.seed, "global_step": progress["global_step"],
            "seconds": time.perf_counter() - process_start, "sps": sps,
            "return_mean_100": float(np.mean(recent)) if recent else None,
            "best_return_mean_100": progress["best_mean"], **evaluation,
            "solved_step": progress["solved_step"], "solved_seconds": progress["solved_seconds"],
        }
        run.finish(summary)
        return summary


def evaluate_and_record(agent: Agent, args: Args, gif: Path) -> dict:
    """Evaluates on fresh seeds, writes the GIF, prints what came out."""
    # The second word keeps these seeds apart from those of training, [seed, global_step]
    returns, lengths = evaluate(agent, args, args.eval_episodes, [args.seed, 0, 1])
    record_gif(agent, args, args.seed, gif)
    print(
        f"{args.env_id}: {len(returns)} {'greedy' if args.deterministic else 'sampled'} episodes, "
        f"return {returns.mean():.1f} +- {returns.std():.1f}, length {lengths.mean():.0f}; {gif}"
    )
    return {
        "eval_return_mean": returns.mean(), "eval_return_std": returns.std(),
        "eval_episodes": len(returns),
    }


def evaluate_checkpoint(args: Args):
    """--evaluate: plays a saved model, a file or a W&B artifact; the GIF lies beside the file."""
    path = args.evaluate
    if not os.path.exists(path) and re.fullmatch(r"[^/:]+/[^/:]+/[^/:]+:[^/:]+", path):
        try:
            path = next(Path(wandb.Api().artifact(path).download()).glob("*.pt"))
        except Exception as error:
            raise UsageError(f"--evaluate {path}: W&B: {error}; a local file works offline") from None
    checkpoint = load_checkpoint(path)
    device = choose_device(args.device)
    with contextlib.closing(start_envs(args, [0])) as envs:
        agent = build_agent(args, envs).to(device)
    agent.load_state_dict(checkpoint["agent"])
    evaluate_and_record(agent, args, Path(path).with_suffix(".gif"))


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
    if path := known.resume or known.evaluate:
        defaults = load_checkpoint(path)["args"]
        source = path
    else:
        defaults = {"env_id": known.env_id, **PRESETS.get(preset, {})}
        source = f"preset {preset}" if preset else "none"
    description = f"PPO. Defaults below are those for {known.env_id} ({source})."
    return tyro.cli(Args, args=argv, default=Args(**defaults), description=description)


def main():
    try:
        args = parse_args()
        if args.evaluate:
            evaluate_checkpoint(args)
        else:
            train(args)
    except UsageError as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        sys.exit(2)
    except (TrainingError, OSError) as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
