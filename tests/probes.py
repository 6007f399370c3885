"""Five environments that each need one thing to work, and toy ones that break in a known way.

Importing this module registers them, so any script can run them from the repository's root:

    python ppo.py --env-id tests.probes:ObsAction-v0

A learner that fails the first three has a broken critic, the fourth a broken policy gradient, the
fifth mixes up samples. After A. Jones, "Debugging Reinforcement Learning Systems" (2021).
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Probe(gym.Env):
    """Two actions; observations are one number."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)
    action_space = Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.full((32, 32, 3), 127 + 100 * self.obs, np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.first_obs()
        return np.array([self.obs], np.float32), {}

    def first_obs(self):
        return 0.0

    def random_sign(self):
        return float(self.np_random.choice([-1.0, 1.0]))


class ConstantValue(Probe):
    """One step, reward 1 whatever happens. V = 1."""

    def step(self, action):
        return np.array([0.0], np.float32), 1.0, True, False, {}


class ObsValue(Probe):
    """One step, the reward is the observation, -1 or 1 at random. V(obs) = obs."""

    def first_obs(self):
        return self.random_sign()

    def step(self, action):
        return np.array([0.0], np.float32), self.obs, True, False, {}


class TwoSteps(Probe):
    """Two steps, reward 1 for the second. V(0) = gamma, V(1) = 1."""

    def step(self, action):
        last, self.obs = self.obs == 1.0, 1.0
        return np.array([self.obs], np.float32), float(last), last, False, {}


class BestAction(Probe):
    """One step, action 1 earns 1 and action 0 earns -1. Best return 1, a random policy's 0."""

    def step(self, action):
        return np.array([0.0], np.float32), 1.0 if action == 1 else -1.0, True, False, {}


class ObsAction(Probe):
    """One step, the action that the observation's sign asks for earns 1, the other -1."""

    def first_obs(self):
        return self.random_sign()

    def step(self, action):
        right = (action == 1) == (self.obs > 0)
        return np.array([0.0], np.float32), 1.0 if right else -1.0, True, False, {}


class Count(gym.Env):
    """obs = [t], reward 1 per step, terminated at t == length; a time limit truncates it instead.

    `reward_nan_at` and `obs_nan_at` break the step of that number, `fail_at` raises in it.
    """

    action_space = Discrete(2)
    observation_space = Box(0.0, np.inf, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self, render_mode=None, length=3, reward_nan_at=None, obs_nan_at=None, fail_at=None
    ):
        self.render_mode, self.length = render_mode, length
        self.reward_nan_at, self.obs_nan_at, self.fail_at = reward_nan_at, obs_nan_at, fail_at
        self.total_steps = 0

    def render(self):
        return np.full((32, 32, 3), self.t % 256, np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([0.0], np.float32), {}

    def step(self, action):
        self.t += 1
        self.total_steps += 1
        if self.total_steps == self.fail_at:
            raise RuntimeError("this environment breaks on purpose")
        obs = np.nan if self.total_steps == self.obs_nan_at else self.t
        reward = np.nan if self.total_steps == self.reward_nan_at else 1.0
        return np.array([obs], np.float32), reward, self.t == self.length, False, {}


for probe in (ConstantValue, ObsValue, TwoSteps, BestAction, ObsAction):
    gym.register(f"{probe.__name__}-v0", probe)
gym.register("Count-v0", Count)
gym.register("CountTimeLimit-v0", Count, max_episode_steps=3, kwargs={"length": 1_000_000})
gym.register("NaNReward-v0", Count, kwargs={"reward_nan_at": 5})
gym.register("NaNObs-v0", Count, kwargs={"obs_nan_at": 5})
gym.register("Failing-v0", Count, kwargs={"fail_at": 5})
