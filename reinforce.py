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

START = time.perf_counter()  # before the slow imports, so that a run can tell how long it took in all

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
from collections import deque
from dataclasses import dataclass
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

# What trains well where; anything given on the command line wins over it.
PRESETS = {
    "Acrobot": {"num_envs": 32},
    "LunarLander": {
        "total_timesteps": 1_000_000, "num_envs": 16, "num_steps": 1000, "learning_rate": 5e-3,
        "gamma": 0.99,
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

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_timesteps / self.batch_size)

    def __post_init__(self):
        counts = "total_timesteps num_envs num_steps updates_per_rollout save_every eval_episodes"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be 1 or more")
        if not 0 <= self.gamma <= 1:
            raise UsageError("--gamma must lie between 0 and 1")
        if self.baseline and self.num_envs == 1:
            raise UsageError(
                "--num-envs 1 with --baseline: the mean over one environment is its own return, so "
                "nothing is left to learn from; use more environments or --no-baseline"
            )


class UsageError(Exception):
    """Something the user can fix: printed as one line, exit code 2."""


class TrainingError(Exception):
    """Something that broke while running: its cause is printed, exit code 1."""


# ------------------------------------------------------------------------------------ environments


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
    """gym.make for vector or discrete (then one-hot) observations and discrete actions."""
    try:
        env = gym.make(env_id, render_mode=render_mode, disable_env_checker=True)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UsageError(f"--env-id {env_id}: {error}") from None
    observations, actions = env.observation_space, env.action_space
    if not isinstance(actions, Discrete):
        raise UsageError(f"{env_id} has {type(actions).__name__} actions, need Discrete: use ppo.py")
    if not isinstance(observations, Discrete) and len(observations.shape or ()) != 1:
        kind = f"{type(observations).__name__} observations of shape {observations.shape}"
        raise UsageError(f"{env_id} has {kind}, need a vector: use ppo.py")
    if isinstance(observations, Discrete):
        env = gym.wrappers.FlattenObservation(env)
    if start := int(actions.start):
        env = gym.wrappers.TransformAction(env, lambda action: action + start, Discrete(actions.n))
    return gym.wrappers.RecordEpisodeStatistics(env)


def make_vector_env(env_id: str, num_envs: int) -> SyncVectorEnv:
    """num_envs copies; the observation after an episode's end is the next episode's first one."""
    makers = [lambda: make_env(env_id)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


# ---------------------------------------------------------------------------------------- networks


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

    @torch.no_grad()
    def act(self, obs, deterministic):
        return self(obs).argmax(-1) if deterministic else get_actions(self, obs)[0]


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
    """Categorical samples by the Gumbel trick, from unit exponential noise. [..., A] each -> [...]"""
    return (logits - noise.log()).argmax(-1)


def get_actions(policy, obs):
    """Samples an action per observation. [N, *obs_shape] -> actions [N], their log-probs [N]"""
    logprobs = policy(obs).log_softmax(-1)
    actions = sample(logprobs, torch.empty_like(logprobs).exponential_())
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def gen_rollout(envs, policy, num_steps, seeds=None):
    """Fills a window with new episodes; also returns the (return, length) of those that ended."""
    device = next(policy.parameters()).device
    (obs, _), steps, episodes = envs.reset(seed=seeds), [], []
    for t in range(num_steps):
        check_finite("observation", obs, t)
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
        actions, logprobs = get_actions(policy, obs)
        next_obs, rewards, terminated, truncated, info = envs.step(actions.cpu().numpy())
        check_finite("reward", rewards, t)
        rewards = torch.as_tensor(rewards, dtype=torch.float32, device=device)
        dones = torch.as_tensor(terminated | truncated, device=device)
        steps.append(RolloutTensors(obs, actions, logprobs, rewards, dones))
        obs = next_obs
        if "final_info" in info:
            ended, episode = info["_final_info"], info["final_info"]["episode"]
            episodes += zip(episode["r"][ended].tolist(), episode["l"][ended].tolist())
    return RolloutTensors(*(torch.stack(field, dim=1) for field in zip(*steps))), episodes


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


# ------------------------------------------------------------------- evaluation, files and logging


@torch.no_grad()
def evaluate(agent: nn.Module, args: Args, num_episodes: int, seed):
    """Raw returns and lengths of num_episodes episodes, the same number in every environment.

    Equal numbers matter: taking the first num_episodes to end would favour short episodes.
    """
    num_envs = max(n for n in range(1, args.num_envs + 1) if num_episodes % n == 0)
    device = next(agent.parameters()).device
    episodes = [[] for _ in range(num_envs)]
    with contextlib.closing(make_vector_env(args.env_id, num_envs)) as envs:
        obs, _ = envs.reset(seed=np.random.SeedSequence(seed).generate_state(num_envs).tolist())
        while min(map(len, episodes)) < num_episodes // num_envs:
            obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
            obs, *_, info = envs.step(agent.act(obs, args.deterministic).cpu().numpy())
            for i in np.flatnonzero(info.get("_final_info", ())):
                episode = info["final_info"]["episode"]
                episodes[i].append((episode["r"][i], episode["l"][i]))
    episodes = [own[: num_episodes // num_envs] for own in episodes]
    return np.array(episodes).reshape(-1, 2).T


def record_gif(agent: nn.Module, args: Args, seed: int, path: Path) -> float:
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


def build_agent(args: Args, env) -> PolicyNetwork:
    return PolicyNetwork(env.observation_space.shape, int(env.action_space.n), args.hidden_sizes)


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

    with (
        stop_signals() as stopped,
        contextlib.closing(make_vector_env(args.env_id, args.num_envs)) as envs,
        Run(args, planned_steps, resumed) as run,
    ):
        policy = build_agent(args, envs.envs[0]).to(device)
        optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5)
        if resumed:
            policy.load_state_dict(resumed["agent"])
            optimizer.load_state_dict(resumed["optimizer"])
            torch.set_rng_state(resumed["rng"])
        recent = deque(progress["recent"], maxlen=100)  # returns of the last training episodes
        threshold = envs.envs[0].spec.reward_threshold if envs.envs[0].spec else None
        first_step, first_time = progress["global_step"], time.perf_counter()
        process_start = START - progress["seconds"]

        for iteration in range(first_step // args.batch_size, args.num_iterations):
            # anneal; the last update still has a rate above zero
            factor = 1 - progress["global_step"] / planned_steps if args.anneal_lr else 1.0
            optimizer.param_groups[0]["lr"] = factor * args.learning_rate

            # collect; with seeds that depend on the step alone a resumed run equals an unbroken one
            seeds = np.random.SeedSequence([args.seed, progress["global_step"]])
            seeds = seeds.generate_state(args.num_envs).tolist()
            tau, episodes = gen_rollout(envs, policy, args.num_steps, seeds)
            progress["global_step"] += args.batch_size

            # update
            metrics = update(policy, optimizer, tau, args)

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
                    "agent": policy.state_dict(), "optimizer": optimizer.state_dict(),
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
        policy.load_state_dict(load_checkpoint(run.folder / "best.pt")["agent"])
        evaluation = evaluate_and_record(policy, args, run.folder / "episode.gif")
        summary = {
            "env_id": args.env_id, "seed": args.seed, "global_step": progress["global_step"],
            "seconds": time.perf_counter() - process_start, "sps": sps,
            "return_mean_100": float(np.mean(recent)) if recent else None,
            "best_return_mean_100": progress["best_mean"], **evaluation,
            "solved_step": progress["solved_step"], "solved_seconds": progress["solved_seconds"],
        }
        run.finish(summary)
        return summary


def evaluate_and_record(agent: nn.Module, args: Args, gif: Path) -> dict:
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
    agent = build_agent(args, make_env(args.env_id)).to(device)
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
    description = f"{SCRIPT}.py. Defaults below are those for {known.env_id} ({source})."
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
