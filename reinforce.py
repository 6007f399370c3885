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

import time

START = time.perf_counter()  # before the slow imports, so that a run can tell its whole duration

import argparse
import contextlib
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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
import wandb
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image
from torch import nn
from tqdm import tqdm

SCRIPT = "reinforce"
BEST_OF = 100  # best.pt holds the model with the best mean of this many training episodes

# What trains well where; anything given on the command line wins over it.
PRESETS = {
    "Acrobot": {
        "total_timesteps": 400_000, "num_envs": 16, "learning_rate": 3e-3, "hidden_sizes": (64, 64),
    },
    "LunarLander": {
        "total_timesteps": 1_000_000, "num_envs": 16, "num_steps": 1000, "learning_rate": 5e-3,
        "gamma": 0.99, "hidden_sizes": (64, 64),
    },
}


@dataclass(frozen=True)
class Args:
    # experiment
    env_id: str = "CartPole-v1"  # Gymnasium environment id, `module:Env-v0` for one of your own
    seed: int = 1  # seeds torch and the environments
    total_timesteps: int = 500_000  # environment steps, rounded up to whole iterations
    device: str = "auto"  # cpu, cuda, mps; auto is the CPU, which is faster for small networks
    runs_dir: str = "runs"  # where the run's folder is created
    save_every: int = 1  # iterations between two checkpoints
    eval_episodes: int = 100  # episodes of the evaluation
    deterministic: bool = True  # evaluate the most likely action instead of a sampled one
    evaluate: str | None = None  # play this checkpoint instead of training
    resume: str | None = None  # continue the run of this checkpoint
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline needs no account
    wandb_project: str = "single-file-rl"  # W&B project
    # algorithm
    num_envs: int = 64  # parallel environments
    num_steps: int = 500  # steps of each environment per iteration: at best the longest episode
    updates_per_rollout: int = 4  # gradient steps on each window
    learning_rate: float = 2e-2  # learning rate
    anneal_lr: bool = True  # the learning rate falls linearly towards zero
    gamma: float = 1.0  # discount per step
    baseline: bool = True  # subtract the mean return of all environments at the same step
    normalize_returns: bool = True  # zero mean and unit deviation over the window
    unfinished: Literal["zero", "drop"] = "zero"  # what to do about episodes that a window cuts
    clip_coef: float | None = 1.0  # importance weights stay in 1 -+ this; None: as they are
    ent_coef: float = 0.0  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    hidden_sizes: tuple[int, ...] = (32, 32)  # hidden layers of the policy

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_timesteps / self.batch_size)

    def __post_init__(self):
        limits = {"gamma": (0, 1), "max_grad_norm": (1e-9, math.inf), "seed": (0, 2**63 - 1)}
        for name in "learning_rate clip_coef ent_coef".split():
            limits[name] = 0, math.inf
        for name in "total_timesteps save_every eval_episodes num_envs num_steps".split():
            limits[name] = 1, math.inf
        limits["updates_per_rollout"] = limits["hidden_sizes"] = 1, math.inf
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(number is None or low <= number <= high for number in numbers):
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {value} must be between {low} and {high}")
        if self.baseline and self.num_envs == 1:
            raise UsageError(
                "--num-envs 1 with --baseline: the mean over one environment is its own return, so "
                "nothing is left to learn from; use more environments or --no-baseline"
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
    """gym.make for vector or discrete (then one-hot) observations and discrete actions."""
    options = {"render_mode": render_mode} if render_mode else {}  # some take no such argument
    try:
        env = gym.make(env_id, disable_env_checker=True, **options)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise UsageError(f"--env-id {env_id}: {first_line(error)}") from None
    observations, actions = env.observation_space, env.action_space
    if not isinstance(actions, Discrete):
        kind = type(actions).__name__
        raise UsageError(f"--env-id {env_id} has {kind} actions, not Discrete ones: use ppo.py")
    if isinstance(observations, Discrete):
        env = gym.wrappers.FlattenObservation(env)
    elif len(observations.shape or ()) != 1:
        kind = f"{type(observations).__name__} observations of shape {observations.shape}"
        raise UsageError(f"--env-id {env_id} has {kind}, not vectors: use ppo.py")
    if env.spec and env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 5_000)  # an evaluation has to end
    if start := int(actions.start):
        env = gym.wrappers.TransformAction(env, lambda action: action + start, Discrete(actions.n))
    return gym.wrappers.RecordEpisodeStatistics(env)


def make_vector_env(env_id: str, num_envs: int) -> SyncVectorEnv:
    """num_envs copies; the observation after an episode's end is the next episode's first one."""
    makers = [lambda: make_env(env_id)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


# ----------------------------------------------------------------------------------------- networks


class PolicyNetwork(nn.Module):
    """Logits of the actions: obs [..., *obs_shape] -> [..., num_actions]."""

    def __init__(self, obs_shape, num_actions, hidden_sizes=(32, 32)):
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


def sample(logits, noise):
    """Categorical samples by the Gumbel trick from unit exponential noise. [..., A] -> [...]"""
    return (logits - noise.log()).argmax(-1)


def get_actions(policy, obs):
    """Samples an action per observation. [N, *obs_shape] -> actions [N], their log-probs [N]"""
    logprobs = policy(obs).log_softmax(-1)
    actions = sample(logprobs, torch.empty_like(logprobs).exponential_())
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def gen_rollout(envs, policy, num_steps, seeds=None):
    """Fills a window with new episodes; also returns the (return, length) of those that ended.

    What the window's end cuts is given up and not counted: short windows favour short episodes.
    """
    device = next(policy.parameters()).device
    (obs, _), steps, episodes = envs.reset(seed=seeds), [], []
    for _ in range(num_steps):
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
        actions, logprobs = get_actions(policy, obs)
        next_obs, rewards, terminated, truncated, info = envs.step(actions.cpu().numpy())
        rewards = torch.as_tensor(rewards, dtype=torch.float32, device=device)
        dones = torch.as_tensor(terminated | truncated, device=device)
        steps.append(RolloutTensors(obs, actions, logprobs, rewards, dones))
        obs = next_obs
        if "final_info" in info:
            ended, episode = info["_final_info"], info["final_info"]["episode"]
            episodes += zip(episode["r"][ended].tolist(), episode["l"][ended].tolist())
    tau = RolloutTensors(*(torch.stack(field, dim=1) for field in zip(*steps)))
    check_finite("observation", tau.obs.transpose(0, 1))
    check_finite("reward", tau.rewards.T)
    return tau, episodes


def check_finite(name: str, values: torch.Tensor):
    """values: [T, N, ...]; stops the run at the cause instead of at a NaN in the weights."""
    if not values.isfinite().all():
        step, index = (~values.isfinite()).nonzero()[0, :2].tolist()
        raise TrainingError(
            f"non-finite {name} from environment {index}, step {step} of the rollout; "
            "nothing was learned from it, the last checkpoint is untouched"
        )


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
        entropy = -tau.logprobs.mean()  # of the policy that acted: an estimate that costs nothing
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


# ---------------------------------------------------------------------------------------- training

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


def make_seeds(words: list[int], num_envs: int) -> list[int]:
    """One seed per environment; other words give other seeds."""
    return np.random.SeedSequence(words).generate_state(num_envs).tolist()


def build_agent(args: Args) -> PolicyNetwork:
    """A new policy for the environment, on the device asked for."""
    device = pick_device(args.device)  # first: initial weights depend on the number of threads
    env = make_env(args.env_id)
    env.close()
    num_actions = int(env.action_space.n)
    return PolicyNetwork(env.observation_space.shape, num_actions, args.hidden_sizes).to(device)


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
    planned_steps = args.num_iterations * args.batch_size

    torch.manual_seed(args.seed)
    policy = build_agent(args)
    optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5, fused=True)
    if resumed:
        restore(policy, resumed, args.resume)
        optimizer.load_state_dict(resumed["optimizer"])
        torch.set_rng_state(resumed["rng"])
    with (
        contextlib.closing(make_vector_env(args.env_id, args.num_envs)) as envs,
        Run(args, planned_steps, envs.envs[0].spec.reward_threshold, resumed) as run,
    ):
        with stop_signals() as stopped:
            for iteration in range(global_step // args.batch_size, args.num_iterations):
                # anneal: the last update still has a rate above zero
                factor = 1 - global_step / planned_steps if args.anneal_lr else 1.0
                optimizer.param_groups[0]["lr"] = args.learning_rate * factor

                # collect: with seeds from the step alone a resumed run equals an unbroken one
                seeds = make_seeds([args.seed, TRAINING, global_step], args.num_envs)
                tau, episodes = gen_rollout(envs, policy, args.num_steps, seeds)
                global_step += args.batch_size

                # update
                metrics = update(policy, optimizer, tau, args)

                # log
                metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                run.log(global_step, episodes, metrics)

                # save
                final = bool(stopped) or iteration == args.num_iterations - 1
                if final or iteration % args.save_every == 0:
                    run.save({
                        "agent": policy.state_dict(), "optimizer": optimizer.state_dict(),
                        "rng": torch.get_rng_state(),
                    }, final)
                if stopped and final:  # a signal between the two waits for the next save
                    print(f"stopped; --resume {run.folder / 'last.pt'} continues", file=sys.stderr)
                    raise SystemExit(128 + stopped[0])

        # evaluate
        run.bar.close()
        policy.load_state_dict(load_checkpoint(run.folder / "best.pt")["agent"])
        return run.finish(*evaluate_and_record(policy, args, run.folder / "episode.gif"))


# --------------------------------------------------------------------------------------- evaluation


def evaluate(agent: nn.Module, args: Args, num_episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw returns and lengths of num_episodes episodes, the same number in every environment.

    Equal numbers matter: the first num_episodes to end would be the short ones.
    """
    torch.manual_seed(args.seed)  # sampled actions repeat too
    num_envs = max(n for n in range(1, args.num_envs + 1) if num_episodes % n == 0)
    quota, episodes = num_episodes // num_envs, [[] for _ in range(num_envs)]
    with contextlib.closing(make_vector_env(args.env_id, num_envs)) as envs:
        obs, _ = envs.reset(seed=make_seeds([args.seed, EVALUATION], num_envs))
        while min(map(len, episodes)) < quota:
            obs, *_, info = envs.step(act(agent, obs, args.deterministic))
            for i in np.flatnonzero(info.get("_final_info", ())):
                episode = info["final_info"]["episode"]
                episodes[i].append((episode["r"][i], episode["l"][i]))
    returns, lengths = np.array([own[:quota] for own in episodes]).reshape(-1, 2).T
    return returns, lengths


def act(agent: nn.Module, obs: np.ndarray, deterministic: bool) -> np.ndarray:
    """Actions for observations [N, ...]: the most likely ones, or samples."""
    with torch.no_grad():
        device = next(agent.parameters()).device
        logits = agent(torch.as_tensor(obs, dtype=torch.float32, device=device))
        noise = torch.ones_like(logits)  # equal noise leaves the most likely action in front
        return sample(logits, noise if deterministic else noise.exponential_()).cpu().numpy()


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
