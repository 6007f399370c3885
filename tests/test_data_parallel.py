"""torchrun: two ranks with half of the environments each learn what one process with all learns."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo
from tests.processes import (
    ROOT,
    clean_env,
    context,
    load,
    read_rows,
    run_folder,
    session_and_state,
    tiny,
    wait_until,
)  # fmt: skip

NUM_STEPS, NUM_ENVS = 16, 8
SETTINGS = {  # every minibatch is the whole rollout: its order differs between ranks
    "plain": {},
    "raw advantages": {"norm_adv": False},
    "statistics": {"norm_obs": True},
    # At some of these one rank's own estimate is past the target an epoch before the other's
    **{f"stopped at {kl}": {"target_kl": kl, "update_epochs": 20}
       for kl in (0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03)},
    "continuous": {"ent_coef": 0.1},
}


def whole_rollout(agent, continuous):
    """Random steps of NUM_ENVS environments, with episode ends and with a scale per environment."""
    shape, random = (NUM_STEPS, NUM_ENVS), torch.Generator().manual_seed(5)
    scale = torch.arange(1.0, NUM_ENVS + 1)
    obs = torch.randn(NUM_STEPS + 1, NUM_ENVS, 3, generator=random) * scale[:, None]
    actions = torch.randint(4, (*shape, 1), generator=random)
    if continuous:
        actions = torch.randn(*shape, 2, generator=random)
    done = torch.rand(shape, generator=random) < 0.1
    terminated = done & (torch.rand(shape, generator=random) < 0.5)
    rewards = torch.randn(shape, generator=random) * scale
    final_obs = obs[1:] * done[..., None]
    return ppo.Rollout(obs, final_obs, actions, rewards, terminated, done, agent.encoder(obs))


def learn(name, rank, ranks, folder):
    """One iteration after collecting, as in train, on this rank's share of the rollout."""
    args = ppo.Args(**{
        "num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "num_minibatches": 1, "update_epochs": 3,
        "hidden_sizes": (16,), "actor_lr": 0.01, **SETTINGS[name],
    })  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    box, continuous = gym.spaces.Box(-1, 1, (3,)), name == "continuous"
    action_space = gym.spaces.Box(-1, 1, (2,)) if continuous else gym.spaces.Discrete(4)
    agent = ppo.Agent(box, action_space, args.hidden_sizes, args.norm_obs)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    own = slice(rank * NUM_ENVS // ranks, (rank + 1) * NUM_ENVS // ranks)
    rollout = ppo.Rollout(*(field[:, own] for field in whole_rollout(agent, continuous)))
    agent.return_stats.update(ppo.gather(rollout.rewards))
    rewards = rollout.rewards / agent.return_stats.var.sqrt()
    batch = ppo.prepare_batch(agent, rollout, rewards, 0.1, args)
    metrics = ppo.update(agent, optimizer, batch, args)
    if args.norm_obs:
        agent.encoder.update(ppo.gather(rollout.obs[:-1]))
    gradients = {key: parameter.grad for key, parameter in agent.named_parameters()}
    torch.save({"agent": agent.state_dict(), "gradients": gradients, "metrics": metrics},
               f"{folder}/{ranks}-{rank}.pt")  # fmt: skip


def as_rank(task, rank, ranks, port, *arguments):
    """Runs the task in a process with the variables that torchrun would give it."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    with ppo.process_group(torch.device("cpu")):
        task(*arguments, rank, ranks)


def free_port():
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def learn_all(folder, rank, ranks):
    for name in SETTINGS:
        (folder / name).mkdir(exist_ok=True)
        learn(name, rank, ranks, folder / name)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    ranks = [context.Process(target=as_rank, args=(learn_all, rank, 2, port, folder))
             for rank in range(2)]  # fmt: skip
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    learn_all(folder, 0, 1)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_learn_what_one_process_learns(name, learned):
    whole = load(learned / name / "1-0.pt")
    first, second = (load(learned / name / f"2-{rank}.pt") for rank in range(2))
    for key, value in whole["agent"].items():
        torch.testing.assert_close(first["agent"][key], value, rtol=1e-4, atol=1e-6, msg=key)
        torch.testing.assert_close(first["agent"][key], second["agent"][key], rtol=0, atol=0)
    for key, value in whole["gradients"].items():
        torch.testing.assert_close(first["gradients"][key], value, rtol=1e-3, atol=1e-6, msg=key)
    assert first["metrics"] == pytest.approx(whole["metrics"], rel=1e-3, abs=1e-5)
    assert first["metrics"] == second["metrics"]


def test_the_shares_of_the_ranks_are_the_environments_of_one_process():
    args = ppo.Args(env_id="CartPole-v1", num_workers=0)  # whose seeds can be told apart
    with contextlib.ExitStack() as stack:
        start = lambda *share: stack.enter_context(  # noqa: E731
            contextlib.closing(ppo.start_envs(args, [3, 0], 6, *share))
        )
        shares = [start(rank, 3).obs for rank in range(3)]
        assert np.array_equal(np.concatenate(shares), start().obs)


# ------------------------------------------------------------------------------------- whole runs


def torchrun(cwd, options="", total_timesteps=100_000):
    arguments = tiny("ppo", f"--num-workers 0 --norm-obs --save-every 1 {options}", total_timesteps)
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port()]
    return subprocess.Popen(
        [sys.executable, *map(str, command), ROOT / "ppo.py", *arguments], cwd=cwd, text=True,
        env=clean_env(HOME=str(cwd), PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def ranks_of(launcher):
    """Pids of the ranks: ppo.py processes whose parent is torchrun."""
    children = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
    with contextlib.suppress(OSError), open(children) as pids:
        return [int(pid) for pid in pids.read().split()]
    return []


def alive(pid):
    return session_and_state(Path(f"/proc/{pid}/stat"))[0] is not None


def train_until(rows, launcher, cwd):
    def trained():
        assert launcher.poll() is None, launcher.communicate()
        return any(len(read_rows(folder)) >= rows for folder in cwd.glob("runs/*")
                   if (folder / "last.pt").exists())  # fmt: skip

    assert wait_until(trained)


def test_a_run_of_two_ranks_writes_one_of_everything(tmp_path):
    options = "--env-id tests.probes:BestAction-v0 --no-norm-adv --actor-lr 0 --wandb-mode offline"
    launcher = torchrun(tmp_path, options, total_timesteps=1024)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    folder = run_folder(tmp_path)
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    assert out.count("greedy episodes") == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["global_step"] == 1024 and len(read_rows(folder)) == 1024 // 64
    agent = load(folder / "last.pt")["agent"]  # both ranks' samples are in the statistics
    for name in ("return_stats.count", "encoder.count"):
        assert agent[name].item() == pytest.approx(1024, abs=1)
    # How many of 64 episodes of one step earned 1, not -1. Were those of one rank missing, or did
    # both ranks draw the same actions, every number would be even.
    good = [32 * (1 + row["charts/episodic_return"]) for row in read_rows(folder)]
    assert good == pytest.approx([round(number) for number in good], abs=1e-6)
    assert any(round(number) % 2 for number in good)


def test_environments_that_cannot_be_shared_out_are_refused(tmp_path):
    launcher = torchrun(tmp_path, "--num-envs 3")
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode != 0 and not (tmp_path / "runs").exists()
    assert "ppo.py: --num-envs 3 must be a multiple of the 2 processes of torchrun" in err


def test_a_killed_rank_ends_the_run(tmp_path):
    launcher = torchrun(tmp_path)
    train_until(3, launcher, tmp_path)
    ranks = ranks_of(launcher)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert wait_until(lambda: not any(map(alive, ranks)))
    assert load(run_folder(tmp_path) / "last.pt")["progress"]["global_step"] >= 64


def test_ctrl_c_stops_both_ranks_and_the_run_can_be_resumed(tmp_path):
    launcher = torchrun(tmp_path)
    train_until(3, launcher, tmp_path)
    ranks = ranks_of(launcher)
    os.kill(launcher.pid, signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert err.count("last.pt continues") == 1 and not any(map(alive, ranks))
    folder = run_folder(tmp_path)
    stopped_at = load(folder / "last.pt")["progress"]["global_step"]
    assert read_rows(folder)[-1]["global_step"] == stopped_at
    resumed = torchrun(tmp_path, f"--resume {folder / 'last.pt'}", stopped_at + 256)
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    steps = [row["global_step"] for row in read_rows(folder)]
    assert steps == list(itertools.accumulate([64] * len(steps))) and steps[-1] >= stopped_at + 256
