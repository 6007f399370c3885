"""ppo.py learns to balance a pole and to land: whole runs with the options that a user gets.

The other scripts' learning tests are beside their own tests. tests/benchmarks has the full-size
figures over many seeds.
"""

import pytest

import ppo


def learn(tmp_path, env_id, seed, *options):
    args = ["--env-id", env_id, "--seed", str(seed), "--runs-dir", str(tmp_path)]
    args += ["--wandb-mode", "disabled", "--eval-episodes", "32", *options]
    return ppo.train(ppo.parse_args(args))


@pytest.mark.parametrize("seed", [1, 2])
def test_cartpole_is_solved(tmp_path, seed):
    summary = learn(tmp_path, "CartPole-v1", seed)
    assert summary["solved_step"] is not None and summary["solved_step"] <= 100_000
    assert summary["return_mean_100"] >= 475 and summary["eval_return_mean"] >= 475


@pytest.mark.parametrize("seed", [1, 2])
def test_a_lander_lands(tmp_path, seed):
    """A quarter of a million steps are half of the default run.

    A random policy earns -227, an advantage that is off by one step -203 after as many steps;
    seeds 1 to 3 ended between 194 and 257 in training and between 168 and 265 in evaluation.
    """
    summary = learn(tmp_path, "LunarLander-v3", seed, "--total-timesteps", "250000")
    assert summary["return_mean_100"] >= 100 and summary["eval_return_mean"] >= 100
