"""Trains ppo.py with its default options on several seeds and says which learning figures hold.

    python tests/benchmarks/ppo_learning.py --env-id LunarLander-v3 --seeds 10
    python tests/benchmarks/ppo_learning.py --env-id CartPole-v1 --seeds 10
    python tests/benchmarks/ppo_learning.py --env-id Hopper-v5 --seeds 3

Options that this script does not know go to ppo.py. One run at a time: seconds are a result, too.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [
    "solved_step", "solved_seconds", "return_mean_100", "best_return_mean",
    "eval_return_mean", "eval_return_std", "eval_episodes", "sps", "seconds",
]  # fmt: skip
# What the other presets promise: the worst seed's evaluation, and the steps it may take
TARGETS = {
    "Acrobot": (-90, None),
    "MountainCar": (-120, None),
    "Pendulum": (-200, None),
    "MountainCarContinuous": (90, None),
    "LunarLanderContinuous": (250, None),
    "HalfCheetah": (2000, 1_000_000),
    "Hopper": (2400, 1_000_000),
    "BipedalWalker": (250, None),
}


def run_process(command: list, timeout: float, **options) -> tuple[str, float]:
    """Runs a command in its own process group; returns its output and its start (Unix time)."""
    started_at = time.time()
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, **options,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{errors[-3000:]}")
    return output, started_at


def run_ppo(env_id: str, seed: int, folder: Path, options=()) -> dict:
    """One training run of ppo.py, as a user would start it; returns its summary.json."""
    folder = folder / time.strftime(f"ppo-{seed}-%Y%m%d-%H%M%S")
    command = [sys.executable, ROOT / "ppo.py", "--env-id", env_id, "--seed", seed]
    run_process([*command, "--runs-dir", folder, *options], timeout=3600)
    return json.loads(next(folder.glob("*/summary.json")).read_text())


def measured_on() -> dict:
    """What the figures depend on beside the code."""
    models, load = [platform.processor()], os.getloadavg()[0]
    if sys.platform == "linux":
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or models
    if load > 0.5:
        print(
            f"load average {load:.1f}: others use this machine, seconds mean little",
            file=sys.stderr,
        )
    return {
        "processor": models[0],
        "cores": os.cpu_count(),
        "load_before": load,
        "date": time.strftime("%Y-%m-%d"),
    }


def as_table(rows: list[dict], columns: list[str]) -> str:
    """A Markdown table; a cell that is missing or null is a dash."""

    def cell(value):
        if value is None:
            return "-"
        return f"{value:,.1f}" if isinstance(value, float) else f"{value}"

    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report_figures(figures: list[tuple[str, bool]]) -> dict:
    for name, holds in figures:
        print(f"{'holds ' if holds else 'FAILS '} {name}")
    return {name: bool(holds) for name, holds in figures}


def spread(rows: list[dict], column: str) -> list[float]:
    """Minimum, median and maximum over seeds; a seed that never got there counts as infinity."""
    values = [float("inf") if row.get(column) is None else row[column] for row in rows]
    return [min(values), statistics.median(values), max(values)]


def learning_figures(env_id: str, rows: list[dict]) -> list[tuple[str, bool]]:
    """What the project promises, with the value that was measured."""
    seeds, base = len(rows), env_id.split("-v")[0]
    _, median_step, worst_step = spread(rows, "solved_step")
    _, median_seconds, _ = spread(rows, "solved_seconds")
    worst_eval = spread(rows, "eval_return_mean")[0]
    mean_eval = statistics.fmean(row["eval_return_mean"] for row in rows)
    worst_final = spread(rows, "return_mean_100")[0]
    if base == "LunarLander":
        return [
            (f"evaluation >= 200 for all {seeds} seeds: worst {worst_eval:.1f}", worst_eval >= 200),
            (f"evaluation >= 250 in the mean over seeds: {mean_eval:.1f}", mean_eval >= 250),
            (f"solved within 250k steps by all: worst {worst_step:,.0f}", worst_step <= 250_000),
            (f"solved within 180k steps by the median: {median_step:,.0f}", median_step <= 180_000),
            (f"solved within 15 s by the median: {median_seconds:.1f} s", median_seconds <= 15),
            (f"no late collapse, last 100 >= 200 for all: {worst_final:.1f}", worst_final >= 200),
        ]
    if base == "CartPole":
        return [
            (f"solved within 100k steps by all: worst {worst_step:,.0f}", worst_step <= 100_000),
            (f"solved within 8 s by the median: {median_seconds:.1f} s", median_seconds <= 8),
        ]
    if base in TARGETS:
        target, budget = TARGETS[base]
        text = f"evaluation >= {target} for all {seeds} seeds: worst {worst_eval:.1f}"
        figures = [(text, worst_eval >= target)]
        if budget is not None:
            steps = max(row["global_step"] for row in rows)  # rounded up to whole iterations
            figures.append((f"about {budget:,} steps at most: {steps:,}", steps <= 1.01 * budget))
        return figures
    return []


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="LunarLander-v3")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    args, options = parser.parse_known_args()
    result, rows = {"env_id": args.env_id, "options": options, **measured_on()}, []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        rows.append(run_ppo(args.env_id, seed, args.out / f"learning-{args.env_id}", options))
        print(as_table(rows[-1:], ["seed", *COLUMNS]).splitlines()[-1], file=sys.stderr)
    summary = zip(("min", "median", "max"), *(spread(rows, column) for column in COLUMNS))
    summary = [dict(zip(["seed", *COLUMNS], line)) for line in summary]
    print(as_table(rows + summary, ["seed", *COLUMNS]))
    result["figures"] = report_figures(learning_figures(args.env_id, rows))
    result["rows"] = rows
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"learning-{args.env_id}.json"
    path.write_text(json.dumps(result, indent=2))
    print(f"written to {path}")
    sys.exit(not all(result["figures"].values()))


if __name__ == "__main__":
    main()
