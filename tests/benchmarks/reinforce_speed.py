"""Environment steps per second: reinforce.py, random actions in the same vector environment, and a
plain REINFORCE loop with one environment, in turns, so that a busy machine slows all three.

    python tests/benchmarks/reinforce_speed.py --rounds 5
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from ppo_learning import ROOT, as_table, measured_on, report_figures, spread
from torch import nn

sys.path.insert(0, str(ROOT))
import reinforce

COLUMNS = ["round", "reinforce.py", "random actions", "plain loop", "x plain", "% of random"]


def script_speed(env_id, total_timesteps):
    """The whole training loop: collecting, updating, logging and saving."""
    preset = reinforce.PRESETS.get(reinforce.preset_name(env_id), {})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = {"env_id": env_id, "runs_dir": folder, "wandb_mode": "disabled"}
        options |= {"total_timesteps": total_timesteps, "eval_episodes": 1}
        return reinforce.train(reinforce.Args(**{**preset, **options}))["sps"]


def random_speed(env_id, seconds):
    """The same vector environment, with actions that cost nothing to choose."""
    preset = reinforce.PRESETS.get(reinforce.preset_name(env_id), {})
    envs = reinforce.make_vector_env(env_id, reinforce.Args(**preset).num_envs)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(
        envs.single_action_space.n, size=(1000, envs.num_envs)
    )
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        envs.step(actions[steps % 1000])
        steps += 1
    return steps * envs.num_envs / (time.perf_counter() - start)


def plain_speed(env_id, seconds):
    """REINFORCE as in most tutorials: one environment, one update per episode."""
    env = gym.make(env_id)
    sizes = env.observation_space.shape[0], int(env.action_space.n)
    policy = nn.Sequential(
        nn.Linear(sizes[0], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, sizes[1])
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        (obs, _), done, log_probs, rewards = env.reset(), False, [], []
        while not done:
            distribution = torch.distributions.Categorical(logits=policy(torch.from_numpy(obs)))
            action = distribution.sample()
            log_probs.append(distribution.log_prob(action))
            obs, reward, terminated, truncated, _ = env.step(action.item())
            rewards.append(reward)
            done = terminated or truncated
        returns, following = [], 0.0
        for reward in reversed(rewards):
            following = reward + 0.99 * following
            returns.insert(0, following)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.stack(log_probs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += len(rewards)
    return steps / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result, rows = {"env_id": args.env_id, **measured_on()}, []
    script_speed(args.env_id, 64_000)  # warm up
    for number in range(1, args.rounds + 1):
        random = random_speed(args.env_id, args.seconds)
        script = script_speed(args.env_id, 320_000)
        plain = plain_speed(args.env_id, args.seconds)
        rows.append(dict(zip(COLUMNS, (number, script, random, plain, script / plain))))
        rows[-1]["% of random"] = 100 * script / random
    median = {name: spread(rows, name)[1] for name in COLUMNS[1:]}
    print(as_table([*rows, {"round": "median", **median}], COLUMNS))
    times, share = median["x plain"], median["% of random"]
    result["figures"] = report_figures([
        (f"20 times the steps/s of a plain one-environment loop: {times:.1f}", times >= 20),
        (f"60% of the steps/s of random actions: {share:.0f}%", share >= 60),
    ])  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"reinforce-speed-{args.env_id}.json"
    path.write_text(json.dumps({**result, "rows": rows}, indent=2))
    print(f"written to {path}")
    sys.exit(not all(result["figures"].values()))


if __name__ == "__main__":
    main()
