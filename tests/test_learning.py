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

    A random policy earns -227. With an advantage that is off by one step the last 100 training
    episodes earn -30, with one summed in the wrong order -691; as it is, four seeds earn 189 to
    259 there, and 217 to 270 in evaluation.
    """
    summary = learn(tmp_path, "LunarLander-v3", seed, "--total-timesteps", "250000")
    assert summary["return_mean_100"] >= 100 and summary["eval_return_mean"] >= 100
