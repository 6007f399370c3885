"""Runs reinforce.py over seeds, each as a process of its own, and prints what each run reached.

    python tests/benchmarks/reinforce_learning.py --env-id CartPole-v1 --seeds 10
    python tests/benchmarks/reinforce_learning.py --env-id Acrobot-v1 --seeds 5
    python tests/benchmarks/reinforce_learning.py --env-id LunarLander-v3 --seeds 5

Further options go to the script. Seconds count from the start of the process, imports included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "reinforce.py"
COLUMNS = ("return_mean_100", "best_return_mean_100", "eval_return_mean", "solved_step",
           "solved_seconds", "seconds", "sps")  # fmt: skip


def run(env_id, seed, options):
    """One training run; the summary that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--env-id", env_id, "--seed", str(seed)]
        subprocess.run(
            [*command, "--runs-dir", folder, *options], check=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(next(Path(folder).glob("*/summary.json")).read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=10)
    arguments, options = parser.parse_known_args()
    print(f"| seed | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    rows = []
    for seed in range(1, arguments.seeds + 1):
        summary = run(arguments.env_id, seed, options)
        rows.append([summary[name] for name in COLUMNS])
        cells = ["-" if value is None else f"{value:.1f}".removesuffix(".0") for value in rows[-1]]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)
    present = [[value for value in column if value is not None] for column in zip(*rows)]
    medians = [f"{statistics.median(column):.1f}" if column else "-" for column in present]
    print(f"| median | {' | '.join(medians)} |")


main()
