"""Trains one peer library's PPO until it solves an environment or meets a step limit.

Run by `ppo_peers.py` in the peers' own virtual environment, one process per run, because the clock
starts with the process. The last line of the output is one JSON object; its times are Unix times.

    python ppo_peers_driver.py sb3 --env-id LunarLander-v3 --seed 1 --limit 1000000
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections import deque

ATARI = any(word.startswith("ALE/") for word in sys.argv)
if not ATARI:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small networks: more threads are slower

import gymnasium as gym
import numpy as np

# The PPO settings of rl-baselines3-zoo. "linear" means annealed to zero over the training.
ZOO = {
    "LunarLander-v3": dict(
        num_envs=16,
        total_timesteps=1_000_000,
        options=dict(
            n_steps=1024, batch_size=64, n_epochs=4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01
        ),
        linear={},
    ),
    "CartPole-v1": dict(
        num_envs=8,
        total_timesteps=100_000,
        options=dict(n_steps=32, batch_size=256, n_epochs=20, gamma=0.98, gae_lambda=0.8),
        linear=dict(learning_rate=0.001, clip_range=0.2),
    ),
    "ALE/Pong-v5": dict(
        num_envs=8,
        total_timesteps=10_000_000,
        options=dict(n_steps=128, batch_size=256, n_epochs=4, ent_coef=0.01),
        linear=dict(learning_rate=2.5e-4, clip_range=0.1),
    ),
}


class Progress:
    """Training returns as every script here counts them: the mean of the last 100 episodes."""

    def __init__(self, threshold: float, limit: int, stop_when_solved: bool):
        self.threshold, self.limit, self.stop_when_solved = threshold, limit, stop_when_solved
        self.returns = deque(maxlen=100)
        self.result = dict(solved_step=None, solved_at=None, best_return_mean_100=None)
        self.result["loop_started_step"] = 0

    def add(self, episode_returns, global_step: int) -> bool:
        """Takes in finished episodes; returns whether training should go on."""
        for episode_return in episode_returns:
            self.returns.append(float(episode_return))
            if len(self.returns) < 100:
                continue
            mean, best = np.mean(self.returns), self.result["best_return_mean_100"]
            self.result["best_return_mean_100"] = mean if best is None else max(best, mean)
            if mean >= self.threshold and self.result["solved_step"] is None:
                self.result.update(solved_step=global_step, solved_at=time.time())
        solved = self.result["solved_step"] is not None
        going_on = global_step < self.limit and not (solved and self.stop_when_solved)
        if not going_on:
            self.result["finished_at"] = time.time()
        return going_on


def train_sb3(env_id, seed, progress: Progress, num_workers=0, algorithm="sb3") -> int:
    """Stable-Baselines3 (PyTorch) and sbx (JAX) share one interface. Returns the steps trained."""
    if algorithm == "sbx":
        from sbx import PPO
    else:
        import torch
        from stable_baselines3 import PPO

        if not ATARI:
            torch.set_num_threads(1)
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    class Watch(BaseCallback):
        def _on_training_start(self):
            progress.result["loop_started_at"] = time.time()

        def _on_step(self):
            finished = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            going_on = progress.add(finished, self.num_timesteps)
            # The last rollout's update is part of its time: end with the next rollout's first step
            return going_on or self.locals["n_steps"] > 0

    zoo = ZOO[env_id]
    if ATARI:
        importlib.import_module("ale_py")
        options = dict(frameskip=1, repeat_action_probability=0.0)  # the wrapper skips
        envs = make_atari_env(env_id, n_envs=zoo["num_envs"], seed=seed, env_kwargs=options)
        envs = VecFrameStack(envs, 4)
    else:
        envs = make_vec_env(env_id, n_envs=zoo["num_envs"], seed=seed)
    # The schedule is the zoo's whole training, whatever the limit here.
    total_timesteps = max(zoo["total_timesteps"], progress.limit)
    linear = {name: lambda left, start=start: left * start for name, start in zoo["linear"].items()}
    policy, options = "CnnPolicy" if ATARI else "MlpPolicy", {**zoo["options"], **linear}
    model = PPO(policy, envs, seed=seed, device="cpu", **options)
    model.learn(total_timesteps, callback=Watch())
    envs.close()
    return model.num_timesteps


def train_sbx(env_id: str, seed: int, progress: Progress, num_workers: int) -> int:
    return train_sb3(env_id, seed, progress, num_workers, algorithm="sbx")


def make_puffer_env(env_id: str, buf=None, seed=0):
    """PuffeRL clamps rewards to [-1, 1]; scaled, it sees more of LunarLander's than their sign."""
    import pufferlib
    import pufferlib.emulation

    env = pufferlib.EpisodeStats(gym.make(env_id))
    if env_id.startswith("LunarLander"):
        env = gym.wrappers.TransformReward(env, lambda reward: reward * 0.01)
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def train_puffer(env_id, seed, progress: Progress, num_workers: int, options=None) -> int:
    """PufferLib 3.0's trainer with its default options, and its vectorised environments."""
    import configparser
    from ast import literal_eval
    from pathlib import Path

    import pufferlib.models
    import pufferlib.pufferl
    import pufferlib.vector
    import torch

    class QuietPuffeRL(pufferlib.pufferl.PuffeRL):
        def print_dashboard(self, *args, **kwargs):
            """The dashboard takes time that belongs to no algorithm."""

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pufferlib.pufferl.ADVANTAGE_CUDA = False  # true wherever an `nvcc` is on the path
    parser = configparser.ConfigParser()
    parser.read(Path(pufferlib.__file__).parent / "config" / "default.ini")
    config = {}
    for name, value in parser["train"].items():
        try:
            config[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            config[name] = value
    config |= dict(env=env_id, device="cpu", seed=seed, use_rnn=False)
    config |= dict(total_timesteps=progress.limit, data_dir=tempfile.mkdtemp())
    # Its box2d.ini asks for minibatches of 2048 and its classic_control.ini for 64 environments.
    config |= options or dict(minibatch_size=2048, bptt_horizon=64)
    num_envs = 4096 // config["bptt_horizon"]
    envs = pufferlib.vector.make(
        make_puffer_env,
        env_kwargs=dict(env_id=env_id),
        backend="Multiprocessing" if num_workers else "Serial",
        num_envs=num_envs,
        num_workers=num_workers or 1,
        batch_size=num_envs,
        overwork=True,
        seed=seed * 1000,
    )
    policy = pufferlib.models.Default(envs.driver_env)
    trainer = QuietPuffeRL(config, envs, policy)
    progress.result["loop_started_at"] = time.time()
    seen, going_on = 0, True
    while going_on:
        returns = trainer.evaluate()["episode_return"]
        going_on = progress.add(returns[seen:], trainer.global_step)
        seen = len(returns)
        if trainer.train() is not None:  # it logged, and began a new list of returns
            seen = 0
    envs.close()
    trainer.utilization.stop()
    return trainer.global_step


def train_puffer_matched(env_id: str, seed: int, progress: Progress, num_workers: int) -> int:
    """PufferLib's trainer with as much learning per step as ppo.py does on LunarLander. Its own
    defaults make one pass with two gradient steps over 4096 steps, where ppo.py makes 48."""
    options = dict(
        bptt_horizon=128, minibatch_size=512, update_epochs=6, optimizer="adam",
        learning_rate=1.5e-3, adam_beta1=0.9, adam_eps=1e-5, gamma=0.995, gae_lambda=0.97,
        ent_coef=0.005, vf_coef=0.5, max_grad_norm=0.5,
    )  # fmt: skip
    return train_puffer(env_id, seed, progress, num_workers, options)


def make_sample_factory_env(env_id, cfg=None, env_config=None, render_mode=None):
    return gym.make(env_id)


def train_sample_factory(env_id, seed, progress: Progress, num_workers: int, options=None) -> int:
    """Sample Factory's asynchronous PPO. It ships no settings for LunarLander; these are the ones
    of the example for Gymnasium environments that comes with it, which is for CartPole."""
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    register_env(env_id, make_sample_factory_env)
    options = options or dict(
        num_envs_per_worker=20, policy_workers_per_policy=2, batch_size=512, reward_scale=0.1
    )
    options |= dict(
        env=env_id, algo="APPO", device="cpu", seed=seed, train_dir=tempfile.mkdtemp(),
        experiment="run", use_rnn=False, recurrence=1, with_vtrace=False,
        num_workers=num_workers or 2, train_for_env_steps=progress.limit, log_to_file=False,
        stats_avg=100, save_every_sec=10_000, experiment_summaries_interval=1_000,
    )  # fmt: skip
    argv = []
    for name, value in options.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    parser, _ = parse_sf_args(argv)
    _, runner = make_runner(parse_full_cfg(parser, argv))

    def watch(runner, message, policy_id):
        steps = runner.env_steps.get(policy_id, 0)
        if steps and "loop_started_at" not in progress.result:  # its processes take long to start
            progress.result.update(loop_started_at=time.time(), loop_started_step=steps)
        if not progress.add([float(message["episodic"]["reward"])], steps):
            runner.cfg.train_for_env_steps = 0  # it ends after the training iteration under way

    runner.register_episodic_stats_handler(watch)
    runner.init()
    runner.run()
    return runner.env_steps[0]


def train_sample_factory_matched(env_id, seed, progress: Progress, num_workers: int) -> int:
    """The same with as many environments, windows and minibatches as ppo.py has on LunarLander, and
    the zoo's discount, lambda and entropy weight."""
    zoo = ZOO[env_id]["options"]
    options = dict(
        num_envs_per_worker=16, rollout=128, batch_size=512, num_batches_per_epoch=8, num_epochs=4,
        learning_rate=1e-3, gamma=zoo["gamma"], gae_lambda=zoo["gae_lambda"],
        exploration_loss_coeff=zoo.get("ent_coef", 0.0), value_bootstrap=True,
        normalize_returns=True, nonlinearity="tanh", encoder_mlp_layers=[64, 64],
        reward_scale=0.01 if env_id.startswith("LunarLander") else 0.1,
    )  # fmt: skip
    return train_sample_factory(env_id, seed, progress, num_workers, options)


SAMPLE_FACTORY = ["sample-factory", "torch", "gymnasium", "numpy"]
PUFFER = ["pufferlib", "torch", "gymnasium", "numpy"]
PEERS = {
    "sb3": (train_sb3, ["stable-baselines3", "torch", "gymnasium", "numpy"]),
    "sbx": (train_sbx, ["sbx-rl", "jax", "gymnasium", "numpy"]),
    "sample-factory": (train_sample_factory, SAMPLE_FACTORY),
    "sample-factory-matched": (train_sample_factory_matched, SAMPLE_FACTORY),
    "puffer": (train_puffer, PUFFER),
    "puffer-matched": (train_puffer_matched, PUFFER),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--env-id", default="LunarLander-v3", choices=ZOO)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=1_000_000, help="steps after which it ends")
    parser.add_argument("--stop-when-solved", action="store_true")
    parser.add_argument("--workers", type=int, default=0, help="for puffer and sample-factory")
    args = parser.parse_args()
    train, packages = PEERS[args.peer]
    threshold = float("inf") if ATARI else gym.spec(args.env_id).reward_threshold
    progress = Progress(threshold, args.limit, args.stop_when_solved)
    global_step = train(args.env_id, args.seed, progress, args.workers)
    result = dict(progress.result, global_step=global_step)
    result["versions"] = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
