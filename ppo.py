"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) in one file.

    python ppo.py --env-id LunarLander-v2          # train, evaluate, save the model and a GIF of it
    python ppo.py --evaluate runs/RUN/best.pt      # play a saved model
    torchrun --nproc-per-node=2 ppo.py             # the same training, shared out to two processes

One iteration: every environment takes `num_steps` steps with the current policy; generalised
advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16) says how much better each
action was than expected; several epochs of minibatches then raise the clipped surrogate (eq. 7)

    E[ min(ratio * advantage, clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage) ],
    ratio = pi(action | obs) / pi_old(action | obs).

Details that matter:
- An episode cut by a time limit has not ended: its last step bootstraps from V(final observation).
- Actor and critic are separate networks with separate learning rates, both annealed linearly; on
  images they share a convolutional encoder, which costs more than all the rest.
- Rewards are divided by the running standard deviation of the discounted return, so that one set of
  learning rates serves environments of any reward scale. Reported returns are raw.
- Advantages are normalised per minibatch; gradients are clipped by norm, per network, or all
  together where networks share the encoder.
- Only the actor runs while stepping; values and log-probs of a rollout are computed in one batch.
- Worker processes help to step environments, over shared memory; results do not depend on them.
"""

import time

START = time.perf_counter()  # before the slow imports, so that a run can tell its whole duration

import os

if __name__ == "__main__":  # before torch reads it: its idle threads would spin on the cores that
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # step environments

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import importlib
import io
import json
import math
import multiprocessing
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
import wandb
from PIL import Image
from torch import distributed, nn
from tqdm import tqdm

SCRIPT = "ppo"
BEST_OF = 100  # best.pt holds the model with the best mean of this many training episodes

# What trains well where; anything given on the command line wins over it.
PRESETS = {
    # A landed craft is paid once it has kept still for half a second. Uniform noise early on lets
    # the policy itself become decided, where an entropy bonus would keep it twitching.
    "LunarLander": {
        "clip_coef": 0.3, "exploration_start": 0.2, "exploration_fraction": 0.2, "ent_coef": 0.002,
    },
    "CartPole": {
        "total_timesteps": 100_000, "num_envs": 16, "num_steps": 64, "num_minibatches": 4,
        "actor_lr": 2e-3, "critic_lr": 4e-3, "gamma": 0.99, "gae_lambda": 0.95,
    },
    "Acrobot": {"total_timesteps": 200_000, "gamma": 0.99, "gae_lambda": 0.95},
    "MountainCar": {
        "total_timesteps": 500_000, "num_steps": 256, "norm_obs": True, "ent_coef": 0.01,
    },
    # Pushing costs, and only the goal pays, a thousand steps away: it has to outweigh the pushing.
    "MountainCarContinuous": {
        "total_timesteps": 200_000, "norm_obs": True, "gamma": 0.9999, "gae_lambda": 0.9,
    },
    "Pendulum": {
        "total_timesteps": 300_000, "update_epochs": 10, "actor_lr": 1e-3, "gamma": 0.9,
        "gae_lambda": 0.95,
    },
    # An entropy bonus holds the deviation at a half, with which the engines never keep still; a
    # smaller gamma makes haste, and one landing in ten a crash.
    "LunarLanderContinuous": {
        "total_timesteps": 800_000, "update_epochs": 10, "actor_lr": 1.5e-3, "gamma": 0.999,
        "gae_lambda": 0.98, "ent_coef": 0.0,
    },
    "BipedalWalker": {
        "total_timesteps": 2_000_000, "num_steps": 256, "norm_obs": True, "ent_coef": 0.0,
    },
    # Small pushes move a robot; with a first deviation of 1 a third of them is cut at the limits.
    "MuJoCo": {
        "total_timesteps": 1_000_000, "num_envs": 64, "num_steps": 32, "num_minibatches": 32,
        "update_epochs": 10, "norm_obs": True, "actor_lr": 3e-4, "critic_lr": 1e-3,
        "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.0, "log_std_init": -2.0,
    },
    "Atari": {
        "total_timesteps": 10_000_000, "num_envs": 8, "num_steps": 128, "num_minibatches": 4,
        "update_epochs": 4, "actor_lr": 2.5e-4, "critic_lr": 2.5e-4, "gamma": 0.99,
        "gae_lambda": 0.95, "clip_coef": 0.1, "ent_coef": 0.01, "clip_reward": True,
        "vf_coef": 0.5, "norm_reward": False, "save_every": 100, "eval_episodes": 10,
    },
}
# One leg has to find out that hopping pays more than standing still
PRESETS["Hopper"] = PRESETS["MuJoCo"] | {"log_std_init": 0.0, "gamma": 0.995, "gae_lambda": 0.97}
MUJOCO = "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum"
MUJOCO = [*MUJOCO.split(), "Pusher", "Reacher", "Swimmer", "Walker2d"]


@dataclass(frozen=True)
class Args:
    # experiment
    env_id: str = "LunarLander-v3"  # Gymnasium environment id, `module:Env-v0` for one of your own
    seed: int = 1  # seeds torch and the environments
    total_timesteps: int = 500_000  # environment steps, rounded up to whole iterations
    device: str = "auto"  # cpu, cuda, mps; auto: a GPU for pixels if there is one, else the CPU
    num_workers: int | None = None  # processes that help to step environments; default cores - 1
    runs_dir: str = "runs"  # where the run's folder is created
    save_every: int = 10  # iterations between two checkpoints
    eval_episodes: int = 100  # episodes of the evaluation
    deterministic: bool = True  # evaluate the most likely action instead of a sampled one
    evaluate: str | None = None  # play this checkpoint instead of training
    resume: str | None = None  # continue the run of this checkpoint
    tune_samples: int | None = None  # search hyperparameters with this many trials, by Ray Tune
    tune_workers: int | None = None  # trials at once; default as many as there are cores
    ray_address: str | None = None  # an existing Ray cluster; default this machine
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline needs no account
    wandb_project: str = "single-file-rl"  # W&B project
    # algorithm
    num_envs: int = 32  # parallel environments, shared out to the ranks under torchrun
    num_steps: int = 128  # steps of each environment per iteration
    num_minibatches: int = 8  # gradient steps per epoch
    update_epochs: int = 6  # passes over each rollout
    learning_rate: float | None = None  # sets actor_lr and critic_lr at once
    actor_lr: float = 2.5e-3  # learning rate of the actor
    critic_lr: float = 4e-3  # learning rate of the critic
    anneal_lr: bool = True  # both learning rates fall linearly towards zero
    gamma: float = 0.995  # discount per step
    gae_lambda: float = 0.97  # 0 trusts the critic alone, 1 the sampled rewards alone
    value_target: Literal["gae", "returns"] = "gae"  # advantages + values, or rewards-to-go
    clip_coef: float = 0.2  # how far the ratio may move before its gradient is cut
    clip_value: bool = False  # clip the critic's step in the same way
    norm_adv: bool = True  # normalise advantages per minibatch
    norm_obs: bool = False  # normalise observations by their running mean and deviation
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return
    clip_reward: bool = False  # learn from the sign of the reward
    exploration_start: float = 0.0  # probability of a uniform action at the start of training
    exploration_fraction: float = 0.5  # share of training over which it falls to zero
    ent_coef: float = 0.005  # weight of the entropy bonus
    vf_coef: float = 1.0  # weight of the critic's loss, for images, where both losses share weights
    max_grad_norm: float = 0.5  # gradients of each network are clipped to this norm
    target_kl: float | None = None  # end the update early once the policy has moved this far
    compile: bool = False  # torch.compile networks and losses: pays on GPUs and in long runs
    log_std_init: float = 0.0  # log of a continuous policy's deviation at the start
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of actor and critic

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_timesteps / self.batch_size)

    def __post_init__(self):
        for names, low, high in (
            ("total_timesteps num_envs num_steps num_minibatches update_epochs", 1, math.inf),
            ("save_every eval_episodes hidden_sizes tune_samples tune_workers", 1, math.inf),
            ("num_workers ent_coef vf_coef actor_lr critic_lr learning_rate", 0, math.inf),
            ("seed", 0, 2**63 - 1),
            ("clip_coef max_grad_norm target_kl", 1e-9, math.inf),
            ("gamma gae_lambda exploration_start", 0, 1),
            ("exploration_fraction", 1e-9, 1),
            ("log_std_init", -5, 2),
        ):
            for name in names.split():
                value, option = getattr(self, name), "--" + name.replace("_", "-")
                for number in value if isinstance(value, tuple) else [value]:
                    if number is not None and not low <= number <= high:
                        raise UsageError(f"{option} {number} must be between {low} and {high}")
        if self.tune_samples and (self.resume or self.evaluate):
            raise UsageError("--tune-samples starts new runs: neither --resume nor --evaluate")
        if self.num_minibatches > self.batch_size:
            raise UsageError(
                f"--num-minibatches {self.num_minibatches} exceeds the {self.batch_size} samples "
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
    """gym.make, plus what the spaces need.

    Vectors stay, images become 4 stacked grey frames of 84 x 84, other observations are flattened;
    a bounded Box of actions is rescaled to [-1, 1] and clipped there.
    """
    atari = env_id.startswith("ALE/")
    options = {}
    if atari:  # the wrapper below skips frames and looks at grey ones
        options = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}
    if render_mode:  # some environments take no such argument
        options["render_mode"] = render_mode
    try:
        if atari:
            importlib.import_module("ale_py")
        env = gym.make(env_id, disable_env_checker=True, **options)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise UsageError(f"--env-id {env_id}: {first_line(error)}") from None
    space = env.observation_space
    if atari:
        env = gym.wrappers.AtariPreprocessing(env)  # no-ops, frame skip 4, maximum of two frames
        env = gym.wrappers.FrameStackObservation(env, 4)
    elif is_image(space) and space.shape[-1] == 3:
        env = gym.wrappers.GrayscaleObservation(env)
        env = gym.wrappers.FrameStackObservation(gym.wrappers.ResizeObservation(env, (84, 84)), 4)
    elif not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if not env.observation_space.shape:
        raise UsageError(f"--env-id {env_id}: {type(space).__name__} observations have no size")
    if env.spec and env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 27_000 if atari else 5_000)  # an evaluation has to end
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete) and len(space.shape) < 2:
        if np.any(space.start):  # here actions are counted from zero
            start = space.start
            single = isinstance(space, gym.spaces.Discrete)
            shifted = type(space)(space.n if single else space.nvec)
            env = gym.wrappers.TransformAction(env, lambda action: action + start, shifted)
    elif isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        if np.isfinite([space.low, space.high]).all():
            low, high = np.float32(-1), np.float32(1)
            env = gym.wrappers.ClipAction(gym.wrappers.RescaleAction(env, low, high))
    else:
        raise UsageError(f"--env-id {env_id}: no way to choose {type(space).__name__} actions")
    return env


def is_image(space: gym.Space) -> bool:
    """Whether observations are images, which stay uint8 until a network scales them."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def step_environments(make, seeds, arrays, first):
    """Generator that owns environments first, first + 1, ...: next() resets them, then steps them.

    It reads their actions from the shared arrays and writes what came back. Autoreset happens in
    the same step: after an episode's end `obs` is already the first observation of the next one,
    and `final_obs` the last one of the episode that ended.
    """
    envs, index = [], first
    try:
        for index, seed in enumerate(seeds, first):
            envs.append(make())
            arrays["obs"][index], _ = envs[-1].reset(seed=int(seed))
        last = first + len(envs)
        totals, lengths, lives = [0.0] * len(envs), [0] * len(envs), [0] * len(envs)
        while True:
            yield
            actions = arrays["actions"][first:last]
            actions = actions.tolist() if actions.ndim == 1 else actions.copy()
            for i, (env, action) in enumerate(zip(envs, actions)):
                index = first + i
                obs, reward, terminated, truncated, info = env.step(action)
                totals[i] += float(reward)
                lengths[i] += 1
                arrays["final_obs"][index] = obs
                arrays["life_lost"][index] = info.get("lives", 0) < lives[i]  # Atari only
                lives[i] = info.get("lives", 0)
                if terminated or truncated:
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
    """Numpy views of shared memory blocks, which reach a spawned worker where arrays do not."""
    return {
        name: np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
        for name, (memory, shape, dtype) in shared.items()
    }


def env_worker(connection, others, make, seeds, shared, first):
    """A worker process: steps its environments once per message, ends with the main process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # Ctrl-C reaches all; the main process decides
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
    """N environments, shared out between this process and W workers, with same-step autoreset.

    After `step(actions)`: `rewards`, `terminated`, `truncated` [N] are of the step just made, `obs`
    [N, ...] is what the policy sees next; where an episode ended, `final_obs`, `episode_returns`
    and `episode_lengths` tell how. All of them are views that the next step overwrites.
    """

    def __init__(self, make, seeds, num_workers=0, start_method=None):
        self.workers, self.connections = [], []
        env = make()
        env.close()
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.reward_threshold = env.spec.reward_threshold if env.spec else None
        num_envs, obs_shape = len(seeds), self.observation_space.shape
        obs_type = np.uint8 if is_image(self.observation_space) else np.float32
        action_type = np.float32 if isinstance(self.action_space, gym.spaces.Box) else np.int64
        layout = {
            "obs": ((num_envs, *obs_shape), obs_type),
            "final_obs": ((num_envs, *obs_shape), obs_type),
            "actions": ((num_envs, *self.action_space.shape), action_type),
            "rewards": ((num_envs,), np.float32),
            "terminated": ((num_envs,), np.bool_),
            "truncated": ((num_envs,), np.bool_),
            "life_lost": ((num_envs,), np.bool_),
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
        own, *others = np.array_split(np.arange(num_envs), 1 + min(num_workers, num_envs - 1))
        self.own = step_environments(make, seeds[: len(own)], as_arrays(shared), 0)
        for chunk in others:
            ours, theirs = context.Pipe()
            self.connections.append(ours)
            task = (theirs, self.connections, gym.vector.utils.CloudpickleWrapper(make),
                    seeds[chunk[0] : chunk[-1] + 1], shared, chunk[0])
            self.workers.append(context.Process(target=env_worker, args=task, daemon=True))
            self.workers[-1].start()
            theirs.close()
        try:
            self._wait()  # for the first observations
        except BaseException:
            self.close()
            raise

    def step(self, actions):
        self.actions[:] = np.reshape(actions, self.actions.shape)
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a dead worker is reported by _wait
                connection.send_bytes(b"")
        self._wait()

    def _wait(self):
        next(self.own)  # this process steps its share while the workers step theirs
        for worker, connection in zip(self.workers, self.connections):
            try:
                failure = connection.recv_bytes()
            except (EOFError, OSError):
                worker.join(1)
                code = worker.exitcode
                raise TrainingError(f"an environment worker died (exit code {code})") from None
            if failure:
                raise TrainingError(failure.decode())

    def close(self):
        self.own.close()
        for connection in self.connections:
            connection.close()
        for worker in self.workers:
            worker.join(2)
            worker.kill()  # does nothing unless it hangs in an environment's step
            worker.join()


# --------------------------------------------------------------------------------------- networks


class RunningMeanStd(nn.Module):
    """Mean and variance of all samples so far (Chan et al. 1979), saved with the agent.

    As a layer it normalises with them; they move only in update(), so evaluation leaves them alone.
    """

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
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.var, self.mean = squares / total, self.mean + delta * count / total
        self.count = total

    def forward(self, samples):
        return ((samples - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)


class ScalePixels(nn.Module):
    """uint8 images to [0, 1]: the one place, for acting, learning and evaluation alike."""

    def forward(self, images):
        # In the convolutions' memory order at once; in place is safe on the copy that .to made
        return images.to(torch.float, memory_format=torch.channels_last).div_(255)


def orthogonal(network: nn.Sequential, output_gain: float) -> nn.Sequential:
    """The network with orthogonal weights, of gain sqrt(2) before the last layer, and zero biases.

    A small output gain makes the first policy close to uniform.
    """
    layers = [layer for layer in network if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, output_gain if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return network


def tanh_network(inputs: int, hidden_sizes, outputs: int, output_gain: float) -> nn.Sequential:
    layers = []
    for width in hidden_sizes:
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return orthogonal(nn.Sequential(*layers, nn.Linear(inputs, outputs)), output_gain)


def image_encoder(channels: int, num_features: int) -> nn.Sequential:
    """Stacked images [N, C, 84, 84] to features, by the network of Mnih et al. 2015."""
    network = nn.Sequential(
        ScalePixels(),
        nn.Conv2d(channels, 32, 8, stride=4), nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, num_features), nn.ReLU(),
    )
    return orthogonal(network, math.sqrt(2)).to(memory_format=torch.channels_last)  # the fast one


class CategoricalActor(nn.Module):
    """A policy of one or several discrete actions, [..., heads]: one softmax for each."""

    def __init__(self, network: nn.Module, nvec: tuple[int, ...]):
        super().__init__()
        self.network, self.nvec = network, nvec

    def noise(self, *shape):
        return torch.empty(*shape, sum(self.nvec)).exponential_()

    def uniform(self, *shape):
        return torch.stack([torch.randint(n, shape) for n in self.nvec], -1)

    def uniform_log_prob(self, actions):
        log_prob = -math.log(math.prod(self.nvec))
        return torch.full(actions.shape[:-1], log_prob, device=actions.device)

    def sample(self, features, noise=None):
        """Random actions, or the most likely ones without noise."""
        logits = self.network(features)
        noise = torch.ones_like(logits) if noise is None else noise
        if len(self.nvec) == 1:  # the usual case, called at every step
            return sample_categorical(logits, noise).unsqueeze(-1)
        heads = zip(logits.split(self.nvec, -1), noise.split(self.nvec, -1))
        return torch.stack([sample_categorical(*head) for head in heads], -1)

    def log_prob_and_entropy(self, features, actions):
        heads = zip(self.network(features).split(self.nvec, -1), actions.unbind(-1))
        log_probs, entropies = zip(*(categorical_log_prob_and_entropy(*head) for head in heads))
        return sum(log_probs), sum(entropies)


class GaussianActor(nn.Module):
    """A policy of continuous actions [..., D], with deviations that do not depend on the state.

    Samples are stored and scored as drawn; only the environment's wrapper clips them.
    """

    def __init__(self, network: nn.Module, size: int, log_std_init: float):
        super().__init__()
        self.network, self.log_std = network, nn.Parameter(torch.full((size,), log_std_init))

    def noise(self, *shape):
        return torch.randn(*shape, len(self.log_std))

    def uniform(self, *shape):
        return torch.rand(*shape, len(self.log_std)) * 2 - 1

    def uniform_log_prob(self, actions):
        inside = (actions.abs() <= 1).all(-1)
        return torch.where(inside, -len(self.log_std) * math.log(2), -math.inf)

    def sample(self, features, noise=None):
        """Random actions, or the means without noise."""
        mean = self.network(features)
        return mean if noise is None else mean + self.log_std.clamp(-5, 2).exp() * noise

    def log_prob_and_entropy(self, features, actions):
        mean, log_std = self.network(features), self.log_std.clamp(-5, 2)
        return gaussian_log_prob_and_entropy(mean, log_std, actions)


class Agent(nn.Module):
    """Encoder, actor and critic, and the statistics that scale rewards.

    features = encoder(obs) is what actor and critic see: of a vector the vector, normalised if
    asked for, so that they have no weights in common; of images what one convolutional network,
    shared by both, makes of them.
    """

    def __init__(
        self, observation_space, action_space, hidden_sizes, norm_obs: bool, log_std_init=0.0
    ):
        super().__init__()
        shape, self.action_shape = observation_space.shape, action_space.shape
        self.shared = len(shape) == 3
        self.return_stats = RunningMeanStd()
        if self.shared:
            self.num_features, hidden_sizes = 512, ()
            self.encoder = image_encoder(shape[0], self.num_features)
        else:
            (self.num_features,) = shape
            self.encoder = RunningMeanStd(shape) if norm_obs else nn.Identity()
        if isinstance(action_space, gym.spaces.Box):
            size = action_space.shape[0]
            network = tanh_network(self.num_features, hidden_sizes, size, 0.01)
            self.actor = GaussianActor(network, size, log_std_init)
        else:
            multi = isinstance(action_space, gym.spaces.MultiDiscrete)
            nvec = tuple(map(int, action_space.nvec)) if multi else (int(action_space.n),)
            network = tanh_network(self.num_features, hidden_sizes, sum(nvec), 0.01)
            self.actor = CategoricalActor(network, nvec)
        self.critic = tanh_network(self.num_features, hidden_sizes, 1, 1.0)

    def value(self, features):
        return self.critic(features).squeeze(-1)

    def clipped(self) -> dict[str, nn.Module]:
        """The parts whose gradients are clipped each by its own norm."""
        return {"agent": self} if self.shared else {"actor": self.actor, "critic": self.critic}


# -------------------------------------------------------------------------------- the mathematics


def sample_categorical(logits, noise):
    """Samples by the Gumbel trick from unit exponential noise. [..., A] each -> [...]"""
    return (logits - noise.log()).argmax(-1)


def categorical_log_prob_and_entropy(logits, actions):
    """log pi(action | obs) and the policy's entropy in nats. [..., A], [...] -> [...], [...]"""
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy


def gaussian_log_prob_and_entropy(mean, log_std, actions):
    """The same for independent normals, summed over D. [..., D], [D], [..., D] -> [...], [...]"""
    log_two_pi = math.log(2 * math.pi)
    scaled = (actions - mean) * (-log_std).exp()
    log_prob = (-0.5 * (scaled**2 + log_two_pi) - log_std).sum(-1)
    entropy = (0.5 * (1 + log_two_pi) + log_std).sum(-1)
    return log_prob, entropy.expand_as(log_prob)


def mixture_log_prob(log_prob, uniform_log_prob, exploration: float):
    """log-prob of acting uniformly with probability `exploration`, else by the policy. [...]"""
    policy_weight, uniform_weight = torch.tensor([1 - exploration, exploration]).log()
    return torch.logaddexp(log_prob + policy_weight, uniform_log_prob + uniform_weight)


def compute_returns(rewards, done, bootstrap, gamma):
    """Discounted rewards-to-go. All inputs and the result: [T, N].

    bootstrap[t] is the value of the state that step t led to, zero if that state is terminal; it
    stands for rewards that are not in the rollout, so it counts only where an episode or the
    rollout ends.
    """
    returns, following = torch.empty_like(rewards), bootstrap[-1]
    for t in reversed(range(len(rewards))):
        following = torch.where(done[t].bool(), bootstrap[t], following)
        returns[t] = following = rewards[t] + gamma * following
    return returns


def compute_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16). Inputs and result: [T, N].

    next_values[t] is the value of the state that step t really led to: at an episode's end that of
    the final observation, not of the next episode's first. Termination removes the bootstrap; any
    episode end stops the trace.
    """
    delta = rewards + gamma * next_values * (1 - terminated.to(rewards)) - values
    decay = gamma * gae_lambda * (1 - done.to(rewards))
    advantages, advantage = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = delta[t] + decay[t] * advantage
    return advantages


def discounted_sums(rewards, done, carry, gamma):
    """Discounted sums of each episode's rewards so far: [T, N], and the carry [N] into the next.

    Its deviation is the scale that rewards are divided by (Engstrom et al. 2020, arXiv:2005.12729).
    """
    sums = torch.empty_like(rewards)
    for t in range(len(rewards)):
        sums[t] = gamma * carry + rewards[t]
        carry = sums[t] * (1 - done[t].to(rewards))
    return sums, carry


def ppo_policy_loss(log_probs, old_log_probs, advantages, clip_coef):
    """Clipped surrogate (Schulman et al. 2017, eq. 7), to minimise, and two diagnostics. [B] each.

    approx_kl estimates KL(old || new) by k3 (Schulman 2020, joschu.net/blog/kl-approx.html), which
    is never negative; clipfrac is the share of ratios beyond the clip.
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
    """Half the mean squared error, [B] each; clip_coef takes the worse one of a clipped step."""
    loss = (values - targets) ** 2
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        loss = torch.max(loss, (clipped - targets) ** 2)
    return 0.5 * loss.mean()


def normalize(advantages):
    """Zero mean, unit deviation; zeros where there is no spread. [B] -> [B]"""
    shifted = advantages - advantages[0]  # equal ones become exact zeros, whatever a mean rounds to
    return (shifted - shifted.mean()) / (shifted.std(correction=0) + 1e-8)


# ----------------------------------------------------------------------------------- data parallel
# Under torchrun each rank steps its share of the environments and learns from its share of each
# minibatch. What crosses ranks, gradients and a few statistics, makes this the same computation as
# one process with all environments. Without torchrun the functions give back what they get.


@contextlib.contextmanager
def process_group(device):
    """Connects the ranks for as long as the block runs."""
    _, ranks = rank_and_ranks()
    if ranks == 1:
        yield
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def rank_and_ranks() -> tuple[int, int]:
    """This process's number, and how many there are."""
    if not distributed.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def exchange(collective, *tensors):
    """A collective operation; when another rank is gone, this one says so and ends as well."""
    try:
        collective(*tensors)
    except RuntimeError as error:
        raise TrainingError(f"another rank was lost: {first_line(error)}") from None


def gather(rows):
    """The rows of all ranks: [n, ...] -> [ranks * n, ...]."""
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(ranks)]
    exchange(distributed.all_gather, gathered, rows.contiguous())
    return torch.cat(gathered)


def gather_episodes(episodes, stopped):
    """The episodes that ended on any rank, and whether any was told to stop: all stop together."""
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return episodes, bool(stopped)
    gathered = [None] * ranks
    exchange(distributed.all_gather_object, gathered, (episodes, bool(stopped)))
    episodes = [episode for own, _ in gathered for episode in own]
    return episodes, any(stop for _, stop in gathered)


def average_gradients(parameters):
    """Replaces gradients by their mean over ranks, in one message."""
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return
    grads = [parameter.grad for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    exchange(distributed.all_reduce, flat)
    sizes = [grad.numel() for grad in grads]
    for grad, mean in zip(grads, (flat / ranks).split(sizes)):
        grad.copy_(mean.view_as(grad))


# ------------------------------------------------------------------------------ collect and update


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T + 1, N, ...], the last row is what the policy sees next
    final_obs: torch.Tensor  # [T, N, ...], an episode's last observation where done, else zeros
    actions: torch.Tensor  # [T, N, number of action dimensions]
    rewards: torch.Tensor  # [T, N], raw
    terminated: torch.Tensor  # [T, N], in Atari the loss of a life as well
    done: torch.Tensor  # [T, N], terminated or truncated: step t ended an episode
    features: torch.Tensor  # [T + 1, N, F], what the encoder made of obs


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
def collect(agent: Agent, envs: VectorEnv, num_steps: int, exploration: float, device):
    """num_steps steps of every environment, and (return, length) of the episodes that ended."""
    actor, num_envs, episodes = agent.actor, len(envs.rewards), []
    noise = actor.noise(num_steps, num_envs).to(device)
    random_actions = actor.uniform(num_steps, num_envs).numpy()
    explore = torch.rand(num_steps, num_envs, 1).numpy() < exploration
    rollout = Rollout(
        obs=np.empty((num_steps + 1, *envs.obs.shape), envs.obs.dtype),
        final_obs=np.zeros((num_steps, *envs.obs.shape), envs.obs.dtype),
        actions=np.empty_like(random_actions),
        rewards=np.empty((num_steps, num_envs), np.float32),
        terminated=np.empty((num_steps, num_envs), np.bool_),
        done=np.empty((num_steps, num_envs), np.bool_),
        features=torch.empty(num_steps + 1, num_envs, agent.num_features, device=device),
    )
    for t in range(num_steps):
        rollout.obs[t] = envs.obs
        rollout.features[t] = agent.encoder(torch.from_numpy(rollout.obs[t]).to(device))
        actions = actor.sample(rollout.features[t], noise[t]).cpu().numpy()
        if exploration > 0:
            actions = np.where(explore[t], random_actions[t], actions)
        rollout.actions[t] = actions
        envs.step(actions)
        rollout.rewards[t] = envs.rewards
        rollout.terminated[t] = envs.terminated | envs.life_lost
        ended = envs.terminated | envs.truncated
        rollout.done[t] = done = ended | envs.life_lost
        if done.any():
            rollout.final_obs[t, done] = envs.final_obs[done]
            episodes += zip(envs.episode_returns[ended], envs.episode_lengths[ended])
    rollout.obs[num_steps] = envs.obs
    rollout.features[num_steps] = agent.encoder(torch.from_numpy(envs.obs).to(device))
    rollout = Rollout(*map(torch.as_tensor, rollout))
    check_finite("observation", rollout.obs)
    check_finite("observation", rollout.final_obs)
    check_finite("reward", rollout.rewards)
    return Rollout(*(field.to(device) for field in rollout)), episodes


@torch.no_grad()
def prepare_batch(agent: Agent, rollout: Rollout, rewards, exploration, args: Args) -> Batch:
    """Log-probs, values, advantages and critic targets of a whole rollout, flattened to [T * N]."""
    values = agent.value(rollout.features)
    next_values = values[1:].clone()
    next_values[rollout.done] = agent.value(agent.encoder(rollout.final_obs[rollout.done]))
    values = values[:-1]
    advantages = compute_gae(
        rewards, values, next_values, rollout.terminated, rollout.done, args.gamma, args.gae_lambda
    )
    if args.value_target == "gae":
        targets = advantages + values
    else:
        bootstrap = next_values * ~rollout.terminated
        targets = compute_returns(rewards, rollout.done, bootstrap, args.gamma)
    obs, actions = rollout.obs[:-1].flatten(0, 1), rollout.actions.flatten(0, 1)
    log_probs, _ = agent.actor.log_prob_and_entropy(rollout.features[:-1].flatten(0, 1), actions)
    log_probs = mixture_log_prob(log_probs, agent.actor.uniform_log_prob(actions), exploration)
    return Batch(obs, actions, log_probs, advantages.flatten(), values.flatten(), targets.flatten())


def minibatch_losses(agent: Agent, minibatch: Batch, args: Args):
    """What one gradient step minimises, and [5] its parts: policy, value, entropy, KL, clipfrac."""
    features = agent.encoder(minibatch.obs)
    log_probs, entropy = agent.actor.log_prob_and_entropy(features, minibatch.actions)
    policy_loss, approx_kl, clipfrac = ppo_policy_loss(
        log_probs, minibatch.log_probs, minibatch.advantages, args.clip_coef
    )
    critic_loss = value_loss(
        agent.value(features), minibatch.values, minibatch.targets,
        args.clip_coef if args.clip_value else None,
    )
    # Where the networks share no weights, each sees only its own terms of the sum
    loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * critic_loss
    return loss, torch.stack([policy_loss, critic_loss, entropy.mean(), approx_kl, clipfrac])


def update(agent: Agent, optimizer, batch: Batch, args: Args) -> dict:
    """Epochs of minibatch gradient steps on one rollout; returns means over all minibatches."""
    losses = torch.compile(minibatch_losses) if args.compile else minibatch_losses
    rank, ranks = rank_and_ranks()
    rows = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs), device=batch.obs.device)
        # Sizes differ by at most one: a stub of a minibatch would make one wild step
        shuffled = (  # index_select is [order], but several times faster
            field.index_select(0, order).tensor_split(args.num_minibatches) for field in batch
        )
        for minibatch in map(Batch._make, zip(*shuffled)):
            if args.norm_adv:
                advantages = normalize(gather(minibatch.advantages))
                minibatch = minibatch._replace(advantages=advantages.tensor_split(ranks)[rank])
            optimizer.zero_grad()
            loss, parts = losses(agent, minibatch, args)
            loss.backward()
            average_gradients(agent.parameters())
            norms = [
                nn.utils.clip_grad_norm_(part.parameters(), args.max_grad_norm)
                for part in agent.clipped().values()
            ]
            rows.append(torch.cat([parts.detach(), torch.stack(norms)]))
            optimizer.step()
        if args.target_kl is not None:
            epoch_kl = gather(torch.stack(rows[-args.num_minibatches :]))[:, 3].mean()
            if epoch_kl > args.target_kl:
                break
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"]
    names += [f"{part}_grad_norm" for part in agent.clipped()]
    means = gather(torch.stack(rows)).mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means)}
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingError(f"non-finite {name}; the last checkpoint is untouched")
    targets, values = gather(batch.targets), gather(batch.values)
    unexplained = (targets - values).var(correction=0)
    spread = targets.var(correction=0)  # zero: NaN, there is nothing to explain
    explained_variance = 1 - unexplained / spread
    return {**metrics, "losses/explained_variance": explained_variance.item()}


# ---------------------------------------------------------------------------------------- training

TRAINING, EVALUATION = 0, 1  # words that keep the seeds of their environments apart


def choose_device(name: str, pixels: bool) -> torch.device:
    """auto is the CPU for vectors, where small networks are faster, and a GPU for pixels."""
    if name == "auto":
        name = "cuda" if pixels and torch.cuda.is_available() else "cpu"
    if name == "cuda":  # each rank of a machine takes a GPU of its own
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {first_line(error)}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu" and not pixels:
        torch.set_num_threads(1)  # more threads make small networks slower, not faster
    return device


def start_envs(args: Args, seed_words: list[int], num_envs: int, rank=0, ranks=1) -> VectorEnv:
    """This rank's share of num_envs environments."""
    workers = args.num_workers
    if workers is None:  # the cores that this and the other ranks of the machine leave free
        workers = max(0, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1)
    seeds = np.random.SeedSequence(seed_words).generate_state(num_envs)
    seeds = np.array_split(seeds, ranks)[rank]
    return VectorEnv(functools.partial(make_env, args.env_id), seeds, workers)


def build_agent(args: Args) -> Agent:
    env = make_env(args.env_id)
    env.close()
    # The device first: initial weights depend on the number of threads that it sets
    device = choose_device(args.device, is_image(env.observation_space))
    agent = Agent(
        env.observation_space, env.action_space, args.hidden_sizes, args.norm_obs, args.log_std_init
    )
    return agent.to(device)


def restore(agent: nn.Module, checkpoint: dict, path: str):
    """Loads the agent of a checkpoint that must fit the environment and the networks."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{path} does not fit the options given: {reason}") from None


def train(args: Args) -> dict:
    """Trains, saves and evaluates as args say; returns what summary.json holds."""
    if args.tune_samples:
        return tune(args)  # which trains in processes of their own
    args = dataclasses.replace(args, env_id=resolve_env_id(args.env_id))
    resumed = load_checkpoint(args.resume) if args.resume else None
    global_step = resumed["progress"]["global_step"] if resumed else 0
    if global_step >= args.total_timesteps:
        raise UsageError(f"{args.resume} has made {global_step} steps; raise --total-timesteps")
    rank, ranks = rank_and_ranks()
    if args.num_envs % ranks or args.num_minibatches > args.batch_size // ranks:
        raise UsageError(
            f"--num-envs {args.num_envs} must be a multiple of the {ranks} processes of torchrun, "
            f"with a sample of each process for each of --num-minibatches {args.num_minibatches}"
        )
    planned_steps = args.num_iterations * args.batch_size
    rates = args.actor_lr, args.critic_lr
    if args.learning_rate is not None:
        rates = args.learning_rate, args.learning_rate

    torch.manual_seed(args.seed)
    agent = build_agent(args)
    device = next(agent.parameters()).device
    policy = [*agent.encoder.parameters(), *agent.actor.parameters()]
    optimizer = torch.optim.Adam(
        [{"params": policy}, {"params": agent.critic.parameters()}], eps=1e-5, fused=True
    )
    if resumed:
        restore(agent, resumed, args.resume)
        optimizer.load_state_dict(resumed["optimizer"])
        torch.set_rng_state(resumed["rng"])
    if rank > 0:  # the same weights, other actions
        torch.manual_seed(int(torch.randint(2**62, ())) + rank)
    if args.compile:  # in place, so that checkpoints keep plain names
        for network in (agent.encoder, agent.actor.network, agent.critic):
            network.compile()
    discounted = torch.zeros(args.num_envs // ranks, device=device)
    # A resumed run starts new episodes, and must not replay the ones that the run began with
    seed_words = [args.seed, TRAINING, global_step]
    with (
        contextlib.closing(start_envs(args, seed_words, args.num_envs, rank, ranks)) as envs,
        process_group(device),  # after the workers were forked, which must not inherit it
        contextlib.nullcontext() if rank else Run(
            args, planned_steps, envs.reward_threshold, resumed
        ) as run,
    ):
        with stop_signals() as stopped:
            for iteration in range(global_step // args.batch_size, args.num_iterations):
                # anneal: the last update still has a rate above zero
                remaining = 1 - global_step / planned_steps
                factor = remaining if args.anneal_lr else 1.0
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * factor

                explored = (1 - remaining) / args.exploration_fraction
                exploration = args.exploration_start * max(0.0, 1 - explored)

                # collect
                rollout, episodes = collect(agent, envs, args.num_steps, exploration, device)
                episodes, stopping = gather_episodes(episodes, stopped)
                global_step += args.batch_size

                # advantages
                rewards = rollout.rewards.sign() if args.clip_reward else rollout.rewards
                if args.norm_reward:
                    done = rollout.done
                    sums, discounted = discounted_sums(rewards, done, discounted, args.gamma)
                    agent.return_stats.update(gather(sums))
                    rewards = (rewards / (agent.return_stats.var + 1e-8).sqrt()).clamp(-10, 10)
                batch = prepare_batch(agent, rollout, rewards, exploration, args)

                # update; the observations' statistics follow it, so that the ratio begins at one
                metrics = update(agent, optimizer, batch, args)
                if isinstance(agent.encoder, RunningMeanStd):
                    agent.encoder.update(gather(rollout.obs[:-1]))

                # log and save: the first rank speaks for all
                final = stopping or iteration == args.num_iterations - 1
                if rank == 0:
                    metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                    run.log(global_step, episodes, metrics)
                if rank == 0 and (final or iteration % args.save_every == 0):
                    run.save({
                        "agent": agent.state_dict(), "optimizer": optimizer.state_dict(),
                        "rng": torch.get_rng_state(),
                    }, final)
                if stopping:
                    break
        if rank > 0:
            return {}
        if stopping or stopped:
            print(f"stopped; --resume {run.folder / 'last.pt'} continues", file=sys.stderr)
            raise SystemExit(128 + (stopped or [signal.SIGTERM])[0])

        # evaluate
        run.bar.close()
        agent.load_state_dict(load_checkpoint(run.folder / "best.pt")["agent"])
        return run.finish(*evaluate_and_record(agent, args, run.folder / "episode.gif"))


# -------------------------------------------------------------------------------------- evaluation


def evaluate(agent: Agent, args: Args, num_episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw returns and lengths of num_episodes episodes, the same number in every environment.

    Equal numbers matter: the first num_episodes to end would be the short ones.
    """
    torch.manual_seed(args.seed)  # sampled actions repeat too
    num_envs = max(n for n in range(1, args.num_envs + 1) if num_episodes % n == 0)
    quota, episodes = num_episodes // num_envs, [[] for _ in range(num_envs)]
    with contextlib.closing(start_envs(args, [args.seed, EVALUATION], num_envs)) as envs:
        while min(map(len, episodes)) < quota:
            envs.step(act(agent, envs.obs, args.deterministic))
            for i in np.flatnonzero(envs.terminated | envs.truncated):
                episodes[i].append((envs.episode_returns[i], envs.episode_lengths[i]))
    returns, lengths = np.array([own[:quota] for own in episodes]).reshape(-1, 2).T
    return returns, lengths


def act(agent: Agent, obs: np.ndarray, deterministic: bool) -> np.ndarray:
    """Actions for observations [N, ...]: the most likely ones, or samples."""
    device = next(agent.parameters()).device
    obs = torch.as_tensor(obs, device=device)
    obs = obs if obs.dtype == torch.uint8 else obs.float()
    with torch.no_grad():
        noise = None if deterministic else agent.actor.noise(len(obs)).to(device)
        actions = agent.actor.sample(agent.encoder(obs), noise).cpu().numpy()
    return actions.reshape(-1, *agent.action_shape)


def evaluate_and_record(agent: nn.Module, args: Args, gif: Path) -> tuple[dict, str]:
    """Evaluates on fresh seeds and writes the GIF; the result for a file, and as a sentence."""
    returns, lengths = evaluate(agent, args, args.eval_episodes)

    def act_alone(obs):
        return act(agent, np.asarray(obs)[None], args.deterministic)[0]

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


# ------------------------------------------------------------------------------------------ tuning

SEARCH = {  # what --tune-samples draws, each from a number that is uniform between 0 and 1
    "actor_lr": lambda u: 3e-4 * 30**u,  # log-uniform from 3e-4 to 9e-3
    "critic_lr": lambda u: 5e-4 * 40**u,  # log-uniform from 5e-4 to 2e-2
    "clip_coef": lambda u: 0.1 + 0.3 * u,
    "gae_lambda": lambda u: 1 - 0.2 * 0.05**u,  # 0.8 to 0.99, log-uniform in 1 - gae_lambda
    "gamma": lambda u: 1 - 0.05 * 0.02**u,  # 0.95 to 0.999, log-uniform in 1 - gamma
}


def draw_trials(args: Args) -> dict[str, Args]:
    """Trials by name; what one of them is does not depend on how many there are."""
    single = dataclasses.replace(
        args, learning_rate=None, tune_samples=None, tune_workers=None, ray_address=None
    )
    trials = {}
    for number in range(1, args.tune_samples + 1):
        rng = np.random.default_rng([args.seed, number])
        drawn = {name: float(f"{draw(rng.random()):.4g}") for name, draw in SEARCH.items()}
        trials[f"trial-{number:03d}"] = dataclasses.replace(single, **drawn)
    return trials


def as_options(args: Args) -> list[str]:
    """The options from which parse_args makes args: those that differ from the preset's."""
    options = ["--env-id", args.env_id]
    defaults = parse_args(options)
    for field in dataclasses.fields(Args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if value == getattr(defaults, field.name):
            continue
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        else:
            options += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return options


def trial_class():
    """What Ray runs; inside a function, since Ray is needed for nothing else."""
    from ray.tune import Trainable

    class Trial(Trainable):
        """A run of this script in a process of its own; Ray gets to see the rows that it writes.

        Its files are all its state: a second attempt first reports the rows of the earlier one, so
        that the scheduler knows what it knew, and then resumes the run if it was not over.
        """

        def setup(self, config):
            self.task, self.folder = config["task"], Path(config["task"]["folder"])
            self.process, self.global_step = None, 0

        def reset_config(self, config):  # the next trial, in the same worker
            self.cleanup()
            self.setup(config)
            return True

        def step(self):
            """Reports each percent of the run, and now and then that there is nothing new."""
            over = any(self.folder.glob("*/summary.json"))  # perhaps since an earlier attempt
            code = self.process.poll() if self.process else 0 if over else None
            rows = self.rows()  # read after the code, so that none is missing at the end
            due = self.global_step + self.task["total_timesteps"] / 100
            due = [row["global_step"] for row in rows if row["global_step"] >= due]
            report = {"status": "stopped"}  # which it will have been if this report is the last
            if due:
                self.global_step = due[0]
            elif code is not None:
                self.global_step = rows[-1]["global_step"] if rows else 0
                report = {"status": "failed" if code else "finished", "done": True}
            elif self.process:
                time.sleep(0.3)
            else:
                self.start(rows)
            if code and "done" in report:
                text = (self.folder / "output.txt").read_text(errors="replace")
                lines = text.rstrip().splitlines()
                report["error"] = lines[-1] if lines and code > 0 else f"exit code {code}"
            for row in rows:
                mean = row.get("charts/return_mean_100")  # None before an episode has ended
                if row["global_step"] <= self.global_step and mean is not None:
                    report["return"] = mean
            return report | {"global_step": self.global_step}

        def rows(self):
            text = "".join(path.read_text() for path in self.folder.glob("*/metrics.jsonl"))
            return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]

        def start(self, rows):
            last, options = next(self.folder.glob("*/last.pt"), None), self.task["options"]
            if last and rows and rows[-1]["global_step"] < self.task["total_timesteps"]:
                options = ["--resume", str(last)]
            else:  # new, or interrupted before the first checkpoint or after the last one
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            die_with_parent = None
            if sys.platform == "linux":  # PR_SET_PDEATHSIG, as Ray does for its own processes;
                # elsewhere a trial whose Ray worker was killed runs to its end
                die_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)
            with (self.folder / "output.txt").open("ab") as output:
                self.process = subprocess.Popen(
                    [*self.task["command"], *options], env=os.environ | self.task["env"],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    preexec_fn=die_with_parent,
                )

        def cleanup(self):
            if self.process:
                self.process.terminate()  # it saves and closes W&B
                self.process.wait()

    return Trial


@contextlib.contextmanager
def ray_session(args: Args, folder: Path):
    """Ray on this machine or a cluster, quiet; no process or file of it stays, however it ends."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AIR_NEW_OUTPUT="0")
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # no return before an episode has ended
    import ray

    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    terminated = []

    def stop(signum, frame):
        terminated.append(signum)
        signal.raise_signal(signal.SIGINT)  # on which Tune lets its trials save and end

    # Short, as it becomes part of the paths of sockets
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
    local = {} if args.ray_address else {
        "num_cpus": args.tune_workers, "object_store_memory": 100 * 2**20,
        "include_dashboard": False, "_temp_dir": temporary,
    }
    try:
        if host := re.fullmatch(r"(?:ray://)?(.+):(\d+)", args.ray_address or ""):
            socket.create_connection(host.groups(), 10).close()  # Ray itself would try for minutes
        ray.init(args.ray_address or "local", log_to_driver=False, logging_level="ERROR", **local)
        signal.signal(signal.SIGTERM, stop)
        yield
    except (ConnectionError, TimeoutError, socket.gaierror) as error:
        raise UsageError(f"--ray-address {args.ray_address}: {first_line(error)}") from None
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(143 if terminated else 130) from None
    finally:
        ray.shutdown()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for path in (temporary, folder / "ray"):
            shutil.rmtree(path, ignore_errors=True)


def run_trials(args: Args, folder: Path, trials: dict[str, Args], scheduler=None) -> dict:
    """Runs each trial in folder / its name; returns how each one ended, as its last report says."""
    import ray
    from ray import tune

    results = {}

    class Report(tune.Callback):
        def on_trial_complete(self, iteration, trials, trial, **info):
            died = {"status": "failed", "error": "its Ray worker died"}
            last = died if trial.status == "ERROR" else trial.last_result
            result = {key: last.get(key) for key in ("status", "return", "global_step", "error")}
            results[name := Path(trial.config["task"]["folder"]).name] = result
            mean = "none" if result["return"] is None else f"{result['return']:.1f}"
            error = f": {result['error']}" if result["error"] else ""
            print(f"{name} {result['status']} at step {result['global_step'] or 0:,}, "
                  f"mean return {mean}{error}", file=sys.stderr)

        on_trial_error = on_trial_complete

    resources = ray.cluster_resources()
    workers = args.tune_workers or int(resources["CPU"])
    gpu = math.floor(1000 * min(1, resources.get("GPU", 0) / workers)) / 1000
    env = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    tasks = [
        {
            "folder": str(folder / name), "total_timesteps": args.total_timesteps,
            "env": env | {"WANDB_RUN_GROUP": folder.name},
            "command": [sys.executable, str(Path(__file__).resolve())],
            "options": as_options(dataclasses.replace(
                trial, runs_dir=str(folder / name), num_workers=args.num_workers or 0
            )),
        }
        for name, trial in trials.items()
    ]
    tune.Tuner(
        tune.with_resources(trial_class(), {"cpu": 1, "gpu": gpu}),
        param_space={"task": tune.grid_search(tasks)},
        tune_config=tune.TuneConfig(
            metric="return", mode="max", scheduler=scheduler, max_concurrent_trials=workers,
            reuse_actors=True,  # starting one takes seconds
        ),
        run_config=tune.RunConfig(
            name="ray", storage_path=str(folder), verbose=0, callbacks=[Report()],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the runs have them
        ),
    ).fit()
    if len(results) < len(trials):
        raise KeyboardInterrupt  # Tune has taken it as a wish to end soon
    return results


def tuning_folder(args: Args) -> Path:
    """Where the tuning of these options is, or will be: the same command finds what it began."""
    name = f"{args.env_id}__{SCRIPT}-tune__{args.seed}"
    folder = Path(args.runs_dir).resolve() / re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    free = {"runs_dir", "tune_samples", "tune_workers", "ray_address"}  # these may change
    options = {key: value for key, value in vars(args).items() if key not in free}
    options, file = json.loads(json.dumps(options)), folder / "args.json"
    if file.exists() and (before := json.loads(file.read_text())) != options:
        changed = next(key for key in options if before.get(key) != options[key])
        raise UsageError(
            f"{folder} holds a tuning with another --{changed.replace('_', '-')}: "
            "choose another --runs-dir or --seed, or delete it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(options, indent=2).encode())
    return folder


def tune(args: Args) -> dict:
    """--tune-samples: searches with Ray Tune, then re-runs the winner on three fresh seeds."""
    try:
        from ray.tune.schedulers import ASHAScheduler
    except ImportError:
        raise UsageError("--tune-samples needs pip install 'ray[tune]==2.60.0'") from None
    if distributed.is_torchelastic_launched():
        raise UsageError("--tune-samples starts processes of its own: run it without torchrun")
    args = dataclasses.replace(args, env_id=resolve_env_id(args.env_id))
    check_wandb(args.wandb_mode, args.wandb_project)
    build_agent(args)  # what would make every trial fail is said before the first one
    trials, folder = draw_trials(args), tuning_folder(args)
    scheduler = ASHAScheduler(  # at 1/8 and 3/8 of the steps, the best third so far goes on
        "global_step", max_t=args.total_timesteps, grace_period=math.ceil(args.total_timesteps / 8),
        reduction_factor=3, stop_last_trials=False,  # the evaluation follows the last step
    )
    with ray_session(args, folder):
        results = run_trials(args, folder, trials, scheduler)
        rows = [
            {"trial": name, **results[name], **{key: getattr(trial, key) for key in SEARCH}}
            for name, trial in trials.items()
        ]
        rows.sort(key=lambda row: (  # a stopped one may not win: it never showed its end
            row["status"] != "finished", math.inf if row["return"] is None else -row["return"]
        ))
        winner = rows[0]["trial"]
        if rows[0]["status"] != "finished":
            errors = [f"{row['trial']}: {row['error']}" for row in rows if row["error"]]
            raise TrainingError(f"no trial finished; {errors[0] if errors else 'all were stopped'}")
        reruns = {
            f"{winner}-seed-{seed}": dataclasses.replace(trials[winner], seed=seed)
            for seed in range(args.seed + 1, args.seed + 4)
        }
        print(f"{winner} is the winner; now on fresh seeds", file=sys.stderr)
        for name, result in run_trials(args, folder, reruns).items():
            if result["status"] != "finished":
                raise TrainingError(f"{name}: {result['error']}")
    files = [next((folder / name).glob("*/summary.json")) for name in reruns]
    evaluations = [json.loads(file.read_text()) for file in files]
    command = shlex.join(["python", f"{SCRIPT}.py", *as_options(trials[winner])])
    return report_tuning(folder, rows, evaluations, command)


def report_tuning(folder: Path, rows: list[dict], evaluations: list[dict], command: str) -> dict:
    """Prints the table of trials and the winner's evaluations, writes tuning.json and .png."""
    names = ["trial", "status", "return", "global_step", *SEARCH]
    table = [names] + [
        [f"{row[n]:.4g}" if isinstance(row[n], float) else str(row[n]) for n in names]
        for row in rows[:10]
    ]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    print(f"{rows[0]['trial']}, the winner, on fresh seeds:")
    for summary in evaluations:
        print(f"seed {summary['seed']}: {summary['eval_episodes']} episodes, return "
              f"{summary['eval_return_mean']:.1f} +- {summary['eval_return_std']:.1f}")
    means = np.array([summary["eval_return_mean"] for summary in evaluations])
    print(f"mean of the seeds {means.mean():.1f} +- {means.std():.1f}")
    result = {"trials": rows, "winner": rows[0]["trial"], "command": command,
              "evaluations": evaluations}
    write_whole(folder / "tuning.json", json.dumps(result, indent=2).encode())
    plot_tuning(folder / "tuning.png", rows)
    print(f"table and picture: {folder}\n{command}")
    return result


def plot_tuning(path: Path, rows: list[dict]):
    """Parallel coordinates: a line is a trial, its colour the return, the last axis the legend."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = [*SEARCH, "return"]
    rows = [row for row in rows if row["return"] is not None]
    values = np.array([[row[name] for name in names] for row in rows])
    logs = np.array([name.endswith("_lr") for name in names])
    values[:, logs] = np.log10(values[:, logs])
    low, high = values.min(0), values.max(0)
    heights = np.where(high > low, (values - low) / np.where(high > low, high - low, 1), 0.5)
    axes = Figure(figsize=(9, 4.5), layout="constrained").add_subplot()
    for line in heights[::-1]:  # the best one last, on top
        axes.plot(line, color=colormaps["viridis"](line[-1]), alpha=0.8)
    for x, log in enumerate(logs):
        axes.axvline(x, color="black", linewidth=0.8)
        for height in np.linspace(0, 1, 5):
            value = low[x] + height * (high[x] - low[x])
            text = f" {10**value if log else value:.3g}"
            axes.text(x, height, text, fontsize=8, bbox={"color": "white", "alpha": 0.6, "pad": 0})
    axes.set(title=path.parent.name, yticks=[], xlim=(-0.1, len(names) - 0.5))
    axes.set_xticks(range(len(names)), names)
    axes.spines[:].set_visible(False)
    image = io.BytesIO()
    axes.figure.savefig(image, format="png", dpi=120)
    write_whole(path, image.getvalue())


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
    if env_id.startswith("ALE/"):
        return "Atari"
    name = re.sub(r"^.*:|-v\d+$", "", env_id)
    return name if name in PRESETS else "MuJoCo" if name in MUJOCO else None


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
