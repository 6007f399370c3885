"""ppo.py's VectorEnv: the same numbers for any worker count, and nothing left behind by any end."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import ppo
from ppo import TrainingError, VectorEnv
from tests.probes import Count
from tests.processes import shared_memory, shared_memory_left

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("obs", "rewards", "terminated", "truncated")
ENDS = ("final_obs", "episode_returns", "episode_lengths")


class FailingSeed(Count):
    """The environment seeded with 3 raises in its second step, the one with 13 in its reset."""

    def reset(self, seed=None, options=None):
        if seed == 13:
            raise RuntimeError("no reset today")
        self.fail_at = 2 if seed == 3 else None
        return super().reset(seed=seed)


class Hanging(Count):
    def step(self, action):
        time.sleep(60)


def make(env_id, **options):
    return functools.partial(gym.make, env_id, disable_env_checker=True, **options)


def alive(pid):
    """Whether a process runs; a zombie that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pids, seconds=5.0):
    """Waits until none of the processes is alive, returns whether that happened in time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def record(env_fn, num_envs, num_workers, start_method=None, num_steps=120):
    """Everything that num_steps steps with fixed actions give, as a list of arrays."""
    actions = np.random.default_rng(0).integers(0, 2, (num_steps, num_envs))
    seeds = np.random.SeedSequence(1).generate_state(num_envs)
    with contextlib.closing(VectorEnv(env_fn, seeds, num_workers, start_method)) as envs:
        assert len(envs.workers) == min(num_workers, num_envs - 1)  # this process keeps one
        rows = [envs.obs.copy()]
        for step in range(num_steps):
            envs.step(actions[step])
            done = envs.terminated | envs.truncated
            rows += [getattr(envs, name).copy() for name in FIELDS]
            rows += [getattr(envs, name)[done] for name in ENDS]
    return rows


@pytest.fixture(scope="module")
def in_process():
    """Five CartPoles with a time limit of 20: both kinds of ends, random resets."""
    return record(make("CartPole-v1", max_episode_steps=20), 5, 0)


# --------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(
    ("num_workers", "start_method"),
    [(1, "fork"), (2, "fork"), (3, "fork"), (5, "fork"), (2, "spawn"), (3, None)],
)
def test_numbers_do_not_depend_on_the_workers(in_process, num_workers, start_method):
    """Five environments over 2 or 3 workers is an uneven split."""
    rows = record(make("CartPole-v1", max_episode_steps=20), 5, num_workers, start_method)
    assert len(rows) == len(in_process)
    for here, there in zip(in_process, rows):
        assert here.dtype == there.dtype and np.array_equal(here, there)


def test_numbers_are_those_of_single_environments(in_process):
    """Each environment is played alone with Gymnasium's own interface."""
    actions = np.random.default_rng(0).integers(0, 2, (120, 5))
    seeds = np.random.SeedSequence(1).generate_state(5)
    steps = [in_process[1 + 7 * t : 8 + 7 * t] for t in range(120)]
    kinds = set()
    for index in range(5):
        env = make("CartPole-v1", max_episode_steps=20)()
        obs, _ = env.reset(seed=int(seeds[index]))
        assert np.array_equal(obs, in_process[0][index])
        total, length = 0.0, 0
        for t, (seen, rewards, terminated, truncated, *end) in enumerate(steps):
            obs, reward, died, cut, _ = env.step(actions[t, index])
            total, length = total + reward, length + 1
            assert (rewards[index], terminated[index], truncated[index]) == (reward, died, cut)
            if died or cut:
                kinds.add((died, cut))
                row = int((terminated | truncated)[:index].sum())
                assert np.array_equal(end[0][row], obs)
                assert (end[1][row], end[2][row]) == (total, length)
                obs, _ = env.reset()
                total, length = 0.0, 0
            assert np.array_equal(seen[index], obs)
    assert kinds >= {(True, False), (False, True)}


def test_observations_and_rewards_are_float32_and_flags_bool(in_process):
    assert [row.dtype.name for row in in_process[1:8]] == [
        "float32", "float32", "bool", "bool", "float32", "float64", "int64"
    ]  # fmt: skip


# -------------------------------------------------------------------------------- ends of episodes


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("env_id", "end"), [("Count-v0", "terminated"), ("CountTimeLimit-v0", "truncated")]
)
def test_an_episodes_end_costs_no_step(num_workers, env_id, end):
    """Episodes of three steps: no junk row between them, counters start anew after either end."""
    with contextlib.closing(VectorEnv(make(f"tests.probes:{env_id}"), [1, 2], num_workers)) as envs:
        assert envs.obs.tolist() == [[0], [0]]
        total, episodes = 0.0, []
        for step in range(1, 13):
            envs.step([0, 1])
            total += envs.rewards[0]
            last = step % 3 == 0
            assert envs.obs[:, 0].tolist() == [step % 3] * 2
            assert getattr(envs, end).tolist() == [last] * 2
            other = "truncated" if end == "terminated" else "terminated"
            assert not getattr(envs, other).any()
            if last:
                assert envs.final_obs.tolist() == [[3], [3]]
                episodes += zip(envs.episode_returns.tolist(), envs.episode_lengths.tolist())
        assert total == 12 and episodes == [(3.0, 3)] * 8


def test_environments_are_seeded_once():
    """Different environments and different episodes of one begin in different states."""
    env_fn = make("CartPole-v1", max_episode_steps=1)
    with contextlib.closing(VectorEnv(env_fn, [5, 6, 7])) as envs:
        starts = {tuple(row) for row in envs.obs.tolist()}
        for _ in range(5):
            envs.step([0, 0, 0])
            starts |= {tuple(row) for row in envs.obs.tolist()}
    assert len(starts) == 18


def test_actions_reach_their_own_environment():
    """BestAction pays 1 for action 1 and -1 for action 0."""
    with contextlib.closing(VectorEnv(make("tests.probes:BestAction-v0"), range(5), 2)) as envs:
        for actions in ([0, 1, 0, 0, 1], [1, 1, 0, 1, 0]):
            envs.step(np.array(actions))
            assert envs.rewards.tolist() == [2 * action - 1 for action in actions]


def test_start_envs_takes_no_more_workers_than_environments():
    args = ppo.Args(env_id="CartPole-v1", num_workers=8)
    with contextlib.closing(ppo.start_envs(args, [1, 0], 3)) as envs:
        assert len(envs.workers) == 2 and envs.obs.shape == (3, 4)
    args = ppo.Args(env_id="CartPole-v1")
    with contextlib.closing(ppo.start_envs(args, [1, 0], 32)) as envs:
        assert len(envs.workers) == min(os.cpu_count() - 1, 31)
        assert (envs.reward_threshold, envs.action_space.n) == (475, 2)


def test_different_seeds_and_purposes_share_no_environment_stream():
    """First observations of seeds 1 to 20, of training, of evaluation and of a resumed run."""
    args, starts, count = ppo.Args(env_id="CartPole-v1", num_workers=0), set(), 0
    for seed in range(1, 21):
        for words in ([seed, ppo.TRAINING, 0], [seed, ppo.EVALUATION], [seed, ppo.TRAINING, 4096]):
            with contextlib.closing(ppo.start_envs(args, words, 8)) as envs:
                starts |= {tuple(row) for row in envs.obs.tolist()}
                count += 8
    assert len(starts) == count


# ----------------------------------------------------------------------------------- when it breaks


@pytest.mark.parametrize(
    ("index", "num_workers", "start_method"),
    [(0, 0, None), (3, 0, None), (0, 2, "fork"), (3, 1, "fork"), (4, 2, "fork"), (3, 1, "spawn")],
)
def test_an_exception_brings_its_traceback_and_index(index, num_workers, start_method):
    """Environment 0 is stepped by this process, 3 and 4 by the last worker if there is one."""
    seeds = [3 if i == index else 0 for i in range(5)]
    with contextlib.closing(VectorEnv(FailingSeed, seeds, num_workers, start_method)) as envs:
        workers = [worker.pid for worker in envs.workers]
        envs.step([0] * 5)
        with pytest.raises(TrainingError) as caught:
            envs.step([0] * 5)
    message = str(caught.value)
    assert f"environment {index} failed" in message
    assert "RuntimeError: this environment breaks on purpose" in message
    assert "probes.py" in message and "in step" in message
    assert ended(workers, 0)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_exception_in_the_first_reset_leaves_no_worker(num_workers):
    before = children()
    with pytest.raises(TrainingError, match=r"environment 2 failed(.|\n)*no reset today") as caught:
        VectorEnv(FailingSeed, [1, 2, 13, 4, 5], num_workers)
    assert ended(children() - before)
    del caught  # its traceback would have kept the half-built object, and with it the pipes


@pytest.mark.parametrize(("victim", "start_method"), [(0, "fork"), (1, "fork"), (1, "spawn")])
def test_a_killed_worker_is_noticed_at_once(victim, start_method):
    env_fn = make("tests.probes:Count-v0")
    with contextlib.closing(VectorEnv(env_fn, [1, 2, 3], 2, start_method)) as envs:
        workers = [worker.pid for worker in envs.workers]
        envs.step([0, 0, 0])
        os.kill(workers[victim], signal.SIGKILL)
        if victim == 0:  # dead before the step, or while it waits
            assert ended(workers[:1])
        start = time.monotonic()
        with pytest.raises(TrainingError, match=r"worker died \(exit code -9\)"):
            envs.step([0, 0, 0])
        assert time.monotonic() - start < 2
    assert ended(workers, 0)


def test_a_worker_that_hangs_is_killed():
    envs = VectorEnv(Hanging, [1, 2], 2)
    envs.connections[0].send_bytes(b"")
    start = time.monotonic()
    envs.close()
    assert time.monotonic() - start < 10 and ended([worker.pid for worker in envs.workers], 0)


def test_workers_leave_signals_to_the_main_process():
    """Ctrl-C and a job manager's SIGTERM reach the whole group; the main process decides."""
    with contextlib.closing(VectorEnv(make("tests.probes:Count-v0"), [1, 2, 3], 2)) as envs:
        envs.step([0] * 3)
        for worker in envs.workers:
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
        time.sleep(0.1)
        envs.step([0] * 3)
        assert envs.obs.tolist() == [[2]] * 3


# ---------------------------------------------------------------------------------- nothing is left


def children():
    """Ids of this process's children, the resource tracker of `spawn` left out."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed if alive(pid)}
    return {int(pid) for pid, name in names.items() if b"resource_tracker" not in name}


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_close_leaves_nothing(start_method):
    before, in_memory = children(), shared_memory()
    envs = VectorEnv(make("tests.probes:Count-v0"), [1, 2, 3], 2, start_method)
    workers = [worker.pid for worker in envs.workers]
    assert children() - before == set(workers)
    envs.step([0] * 3)
    envs.close()
    envs.close()  # twice does no harm
    assert ended(workers, 0) and children() == before and not shared_memory_left(in_memory)


def test_many_starts_leak_no_file():
    for _ in range(5):
        envs = VectorEnv(make("tests.probes:Count-v0"), [1, 2, 3], 2)
        envs.step([0] * 3)
        envs.close()
        counts = open_files()
        del envs
    first = counts
    for _ in range(5):
        envs = VectorEnv(make("tests.probes:Count-v0"), [1, 2, 3], 2)
        envs.close()
        del envs
    assert open_files() <= first


def test_environments_are_closed(tmp_path):
    """Both in this process and in workers, at close and after a failure."""

    class Closing(FailingSeed):
        def close(self):
            time.sleep(0.1)  # a worker is given the time for it
            (tmp_path / str(id(self))).touch()

    for num_workers, seeds in ((0, [1, 2]), (2, [1, 2]), (0, [3, 4])):
        with (
            contextlib.suppress(TrainingError),
            contextlib.closing(VectorEnv(Closing, seeds, num_workers)) as envs,
        ):
            for path in tmp_path.iterdir():
                path.unlink()  # the one made to read the spaces from
            for _ in range(3):
                envs.step([0, 0])
        # two forked workers may give their environment the same address
        assert len(list(tmp_path.iterdir())) in ((1, 2) if num_workers else (2,))


PROGRAM = """
import sys
import numpy as np
from ppo import VectorEnv
from tests.test_vector_env import FailingSeed, make

if __name__ == "__main__":
    how, start_method = sys.argv[1:]
    env_fn = make("CartPole-v1") if how != "raise" else FailingSeed
    envs = VectorEnv(env_fn, np.arange(5) if how == "raise" else np.arange(64), 2, start_method)
    print(*(worker.pid for worker in envs.workers), flush=True)
    if how == "idle":
        sys.stdin.read()
    while True:
        envs.step(np.zeros(len(envs.rewards), int))
"""


@pytest.mark.parametrize(
    ("how", "start_method"), [("busy", "fork"), ("idle", "fork"), ("busy", "spawn")]
)
def test_nothing_outlives_a_killed_main_process(how, start_method, tmp_path):
    program, before = tmp_path / "program.py", shared_memory()
    program.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    main = subprocess.Popen(
        [sys.executable, program, how, start_method],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, cwd=tmp_path,
    )  # fmt: skip
    try:
        workers = [int(pid) for pid in main.stdout.readline().split()]
        assert len(workers) == 2 and all(map(alive, workers))
        time.sleep(0.2)
    finally:
        main.kill()
        main.wait()  # not communicate: workers that live on would keep the pipe open
        main.stdin.close()
        main.stdout.close()
    assert ended(workers)
    assert not shared_memory_left(before)


def test_a_program_that_never_catches_the_failure_ends(tmp_path):
    """An uncaught exception keeps the environments referenced until the very end of Python."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("np.arange(5)", "np.array([1, 13])"))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program, "raise", "fork"],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "no reset today" in done.stderr
