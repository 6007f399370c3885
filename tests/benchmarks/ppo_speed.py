"""Measures the speed, memory and start-up of ppo.py (Linux).

python tests/benchmarks/ppo_speed.py collect  # collecting against random actions, same workers
python tests/benchmarks/ppo_speed.py scaling  # steps/s for 0, 1, 2 workers, 8 to 128 environments
python tests/benchmarks/ppo_speed.py memory   # peak of a default run, shared pages counted once
python tests/benchmarks/ppo_speed.py startup  # process start to the first environment step
python tests/benchmarks/ppo_speed.py all
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
from ppo_learning import ROOT, as_table, measured_on, report_figures, run_ppo

FIRST_STEP_FILE = "PPO_SPEED_FIRST_STEP_FILE"  # environment variable, see FirstStep


class FirstStep(gym.Wrapper):
    """LunarLander that notes the time of its first step: start-up seen from outside of ppo.py."""

    def __init__(self, **options):
        super().__init__(gym.make("LunarLander-v3", **options))
        self.path = os.environ.get(FIRST_STEP_FILE)

    def step(self, action):
        if self.path:
            with contextlib.suppress(FileExistsError), open(self.path, "x") as file:
                file.write(repr(time.time()))
            self.path = None
        return self.env.step(action)


gym.register("FirstStep-v0", entry_point=FirstStep)  # ppo.py --env-id ppo_speed:FirstStep-v0


def steps_per_second(function, steps: int) -> float:
    start = time.perf_counter()
    function()
    return steps / (time.perf_counter() - start)


def start_environments(num_envs: int, num_workers: int | None):
    """The environments of a LunarLander training, as ppo.py starts them."""
    import ppo

    num_workers = os.cpu_count() - 1 if num_workers is None else num_workers
    make = functools.partial(ppo.make_env, "LunarLander-v3")
    return contextlib.closing(
        ppo.VectorEnv(make, list(range(num_envs)), num_workers)
    )


def random_stepper(envs, num_steps: int):
    """A function that steps all environments with actions drawn beforehand."""
    import numpy as np

    shape = (num_steps, len(envs.rewards))
    actions = np.random.default_rng(0).integers(envs.action_space.n, size=shape)

    def step_all():
        for row in actions:
            envs.step(row)

    return step_all


def measure_collecting(args) -> list[tuple[str, bool]]:
    """Alternating blocks. An untrained policy is near uniform, so both see the same kind of
    episodes. A whole training does not (hovering costs more than falling), so it is only shown.
    """
    import torch

    import ppo

    torch.set_num_threads(1)
    options = ppo.Args(
        num_workers=args.workers, wandb_mode="disabled", eval_episodes=1,
        runs_dir=str(args.out / "speed"),
    )  # fmt: skip
    device, samples = torch.device("cpu"), options.batch_size
    with start_environments(options.num_envs, args.workers) as envs:
        agent = ppo.build_agent(options)
        random_steps = random_stepper(envs, options.num_steps)
        ratios, rates = [], []
        for _ in range(args.repeats * 5):
            random_rate = steps_per_second(random_steps, samples)
            rate = steps_per_second(
                lambda: ppo.collect(agent, envs, options.num_steps, 0.0, device), samples
            )
            rates.append((rate, random_rate))
            ratios.append(rate / random_rate)
    collecting, stepping = (statistics.median(column) for column in zip(*rates))
    ratio = statistics.median(ratios)
    print(
        f"untrained: collecting {collecting:,.0f} steps/s, random actions {stepping:,.0f} steps/s"
    )

    collect, seconds = ppo.collect, []

    def timed_collect(*arguments, **named):
        start = time.perf_counter()
        result = collect(*arguments, **named)
        seconds.append(time.perf_counter() - start)
        return result

    ppo.collect = timed_collect
    summary = ppo.train(options)
    ppo.collect = collect
    steps, rate = summary["global_step"], summary["sps"]
    share = sum(seconds) / (steps / rate)
    print(f"whole training: {rate:,.0f} steps/s; ", end="")
    print(f"collecting {steps / sum(seconds):,.0f} steps/s, {share:.0%} of the time")
    text = f"collecting at >= 80% of random stepping: median {ratio:.0%} of alternating blocks, "
    return [(text + f"{min(ratios):.0%} to {max(ratios):.0%}", ratio >= 0.8)]


def measure_scaling(args) -> list[tuple[str, bool]]:
    """Two tables: random actions only, and short trainings through the command line."""
    rows = []
    for num_workers in (0, 1, 2):
        stepping = {"workers": num_workers, "steps/s": "random actions"}
        training = {"workers": num_workers, "steps/s": "training"}
        for num_envs in (8, 16, 32, 64, 128):
            with start_environments(num_envs, num_workers) as envs:
                step_all = random_stepper(envs, 8192 // num_envs)
                rates = [steps_per_second(step_all, 8192) for _ in range(args.repeats + 1)]
            stepping[str(num_envs)] = f"{statistics.median(rates[1:]):,.0f}"
            command = ["--num-workers", num_workers, "--num-envs", num_envs]
            command += ["--total-timesteps", args.steps, "--eval-episodes", 1]
            command += ["--wandb-mode", "disabled"]
            runs = [
                run_ppo("LunarLander-v3", seed, args.out / "speed", command)
                for seed in range(args.repeats)
            ]
            training[str(num_envs)] = f"{statistics.median(run['sps'] for run in runs):,.0f}"
        rows += [stepping, training]
    rows.sort(key=lambda row: row["steps/s"])
    print(as_table(rows, list(rows[0])))
    return []


def family(pid: int) -> list[int]:
    """The process, its descendants, and what else shares its session."""
    parents, sessions = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            sessions[int(stat.parent.name)] = int(fields[3])
    members = {pid} | {member for member, session in sessions.items() if session == pid}
    grown = 0
    while grown != len(members):
        grown = len(members)
        members |= {child for child, parent in parents.items() if parent in members}
    return sorted(members)


def proportional_set_size(pid: int) -> int:
    """Resident bytes of a process, each shared page divided by the number of its users."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def measure_memory(args) -> list[tuple[str, bool]]:
    """A default run, W&B's own process included."""
    command = [sys.executable, ROOT / "ppo.py", "--runs-dir", args.out / "speed"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    peak, at_peak = 0, {}
    try:
        while process.poll() is None:
            sizes = {pid: proportional_set_size(pid) for pid in family(process.pid)}
            if sum(sizes.values()) > peak:
                peak, at_peak = sum(sizes.values()), sizes
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise SystemExit(f"ppo.py ended with {process.returncode}")
    parts = ", ".join(f"{size / 1e6:.0f}" for size in sorted(at_peak.values(), reverse=True))
    text = f"peak memory of all processes < 1 GB: {peak / 1e6:.0f} MB ({parts})"
    return [(text, peak < 1e9)]


def measure_startup(args) -> list[tuple[str, bool]]:
    """From the start of the process, as its parent sees it; the first, cold one is not counted."""
    args.out.mkdir(parents=True, exist_ok=True)
    marker, seconds = args.out / "first-step", []
    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, FIRST_STEP_FILE: str(marker), "PYTHONPATH": paths}
    for _ in range(args.repeats + 1):
        marker.unlink(missing_ok=True)
        command = [sys.executable, ROOT / "ppo.py", "--env-id", "ppo_speed:FirstStep-v0"]
        started_at = time.time()
        process = subprocess.Popen(
            [*command, "--runs-dir", args.out / "speed"], env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None and not (marker.exists() and marker.read_text()):
            time.sleep(0.01)
        ended = process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if ended and not marker.exists():
            raise SystemExit(f"ppo.py ended with {process.returncode} before its first step")
        seconds.append(float(marker.read_text()) - started_at)
        marker.unlink()
    median, worst = statistics.median(seconds[1:]), max(seconds[1:])
    text = (
        f"start-up < 6 s warm: median {median:.2f} s, worst {worst:.2f} s, first {seconds[0]:.2f} s"
    )
    return [(text, median < 6)]


MEASUREMENTS = {
    "collect": measure_collecting,
    "scaling": measure_scaling,
    "memory": measure_memory,
    "startup": measure_startup,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*MEASUREMENTS, "all"])
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each kind; medians are shown"
    )
    parser.add_argument("--workers", type=int, help="of `collect`; default: what ppo.py takes")
    parser.add_argument("--steps", type=int, default=65_536, help="of each training of `scaling`")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    args = parser.parse_args()
    result, figures = measured_on(), []
    for name in MEASUREMENTS if args.what == "all" else [args.what]:
        figures += MEASUREMENTS[name](args)
    result["figures"] = report_figures(figures)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"speed-{args.what}.json").write_text(json.dumps(result, indent=2))
    sys.exit(not all(result["figures"].values()))


if __name__ == "__main__":
    main()
