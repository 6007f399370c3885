"""Runs the scripts in processes of their own, as a shell would, but without the seconds of imports.

`start` forks them from a server process that has imported all three already. Everything else is as
on the command line: arguments, working directory, exit code, what is printed, signals. Where the
start-up itself matters, tests use `subprocess` instead.
"""

import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("reinforce", "ppo", "dreamer_actor_loss")

# Smallest settings; an iteration (a row of metrics.jsonl) is ROW environment steps
TINY = {
    "reinforce": "--num-envs 4 --num-steps 16 --hidden-sizes 8 --updates-per-rollout 1",
    "ppo": "--num-envs 4 --num-steps 16 --hidden-sizes 8 --num-workers 2 --num-minibatches 2"
    " --update-epochs 1",
    "dreamer_actor_loss": "--num-envs 2 --log-every 64 --learning-starts 32 --train-ratio 0.5"
    " --batch-size 2 --batch-length 4 --horizon 2 --deter 8 --hidden 8 --stoch 2 --classes 4"
    " --units 8 --layers 1 --blocks 2 --num-bins 11",
}
ROW = 64

context = multiprocessing.get_context("forkserver")
LATE_IMPORTS = [  # what the scripts' libraries import only when it is needed
    "torch._dynamo", "gymnasium.envs.classic_control", "gymnasium.envs.box2d", "pygame",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "PIL.GifImagePlugin",
    "PIL.PngImagePlugin",
]  # fmt: skip
context.set_forkserver_preload(["tests.processes", "tests.probes", *SCRIPTS, *LATE_IMPORTS])


def tiny(script, options="", total_timesteps=512, env_id="CartPole-v1"):
    """Arguments of a run of a second or two; later ones win."""
    return [
        *f"--env-id {env_id} --total-timesteps {total_timesteps} --eval-episodes 4".split(),
        *TINY[script].split(), "--wandb-mode", "disabled", *options.split(),
    ]  # fmt: skip


def clean_env(**changes):
    """The environment variables without what would change W&B's behaviour."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


class ScriptProcess:
    """A running script: `pid`, `wait()` -> exit code, `out` and `err` once it has ended."""

    def __init__(self, script, arguments, cwd, before=None):
        names = ("out", "err")
        logs = [Path(cwd, f".{time.monotonic_ns()}.{name}") for name in names]
        self.files = dict(zip(names, logs))
        task = (script, arguments, str(cwd), [str(log) for log in logs], before)
        self.process = context.Process(target=run_main, args=task)
        self.process.start()
        self.pid = self.process.pid

    def wait(self, seconds=120):
        self.process.join(seconds)
        if self.process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.join()
            raise AssertionError(f"still running after {seconds} s:\n{self.read('err')}")
        self.code = self.process.exitcode
        self.out, self.err = self.read("out"), self.read("err")
        for log in self.files.values():
            log.unlink(missing_ok=True)
        return self.code

    def read(self, name):
        return self.files[name].read_text() if self.files[name].exists() else ""

    def running(self):
        return self.process.exitcode is None

    def members(self):
        """Pids of all live processes of this script's session: itself, workers, whatever else."""
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat")
                if session_and_state(path)[0] == str(self.pid)]  # fmt: skip

    def left_over(self, seconds=5):
        """Processes of the session that live on after the script's end."""
        wait_until(lambda: not self.members(), seconds)
        return self.members()


def session_and_state(stat):
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return None, None
    return (None if fields[0] == "Z" else fields[3]), fields[0]


def run_main(script, arguments, cwd, logs, before):
    """In the new process: become a session of its own and call the script's main()."""
    multiprocessing.set_start_method("fork", force=True)  # not the server's, but the usual one
    os.setsid()
    os.environ.update(clean_env())
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, log in enumerate(logs, 1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    sys.argv = [f"{script}.py", *arguments]
    if before:
        before()
    importlib.import_module(script).main()


def start(script, arguments, cwd, before=None):
    os.environ["PYTHONPATH"] = str(ROOT)  # the server looks for what it preloads when it starts
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as ppo.py sets it before it imports torch
    return ScriptProcess(script, arguments, cwd, before)


def run(script, arguments, cwd, before=None, code=0):
    process = start(script, arguments, cwd, before)
    assert process.wait() == code, process.err
    return process


def wait_until(condition, seconds=60.0, every=0.01):
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return result


def run_folder(cwd):
    (folder,) = Path(cwd, "runs").iterdir()
    return folder


def read_rows(folder):
    """Rows of metrics.jsonl; the last line may be cut where a kill hit."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def load(path):
    return torch.load(path, weights_only=True)


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def shared_memory_left(before):
    """What is in shared memory that was not; tests beside this one may use some for a moment."""
    wait_until(lambda: shared_memory() <= before, 10)
    return shared_memory() - before
