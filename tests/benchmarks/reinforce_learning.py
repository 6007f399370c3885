"""Trains reinforce.py with its presets on several seeds and says which learning figures hold.

    python tests/benchmarks/reinforce_learning.py --env-id CartPole-v1 --seeds 10
    python tests/benchmarks/reinforce_learning.py --env-id Acrobot-v1 --seeds 5
    python tests/benchmarks/reinforce_learning.py --env-id LunarLander-v3 --seeds 5

Options that this script does not know go to reinforce.py. One run at a time: seconds are a result.
"""

import argparse
import json
import sys
from pathlib import Path

from ppo_learning import COLUMNS, ROOT, as_table, measured_on, report_figures, run_process, spread


def run_reinforce(env_id: str, seed: int, folder: Path, options=()) -> dict:
    """One training run of reinforce.py, as a user would start it; returns its summary.json."""
    command = [sys.executable, ROOT / "reinforce.py", "--env-id", env_id, "--seed", seed]
    before = set(folder.glob("*/summary.json"))
    run_process([*command, "--runs-dir", folder, *options], timeout=3600)
    (new,) = set(folder.glob("*/summary.json")) - before
    return json.loads(new.read_text())


def learning_figures(env_id: str, rows: list[dict]) -> list[tuple[str, bool]]:
    """What the project promises, with the value that was measured."""
    seeds, base = len(rows), env_id.split("-v")[0]
    worst = spread(rows, "return_mean_100")[0]
    if base == "CartPole":
        _, seconds, _ = spread(rows, "solved_seconds")
        perfect = sum(row["eval_return_mean"] == 500 for row in rows)
        return [
            (f"training mean >= 475 for all {seeds} seeds: worst {worst:.1f}", worst >= 475),
            (f"there within 10 s of process start by the median: {seconds:.1f} s", seconds <= 10),
            (f"greedy evaluation 500 for 9 of 10: {perfect} of {seeds}", perfect >= 0.9 * seeds),
        ]
    if base == "Acrobot":
        return [(f"training mean >= -100 for all {seeds} seeds: worst {worst:.1f}", worst >= -100)]
    if base == "LunarLander":
        good = sum(row["return_mean_100"] >= 100 for row in rows)
        steps = max(row["global_step"] for row in rows)
        return [
            (f"training mean >= 100 for 3 of 5: {good} of {seeds}", good >= 0.6 * seeds),
            (f"within a million steps: {steps:,}", steps < 1_010_000),
        ]
    return []


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    args, options = parser.parse_known_args()
    result, rows = {"env_id": args.env_id, "options": options, **measured_on()}, []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        folder = args.out / f"reinforce-{args.env_id}"
        rows.append(run_reinforce(args.env_id, seed, folder, options))
        print(as_table(rows[-1:], ["seed", *COLUMNS]).splitlines()[-1], file=sys.stderr)
    summary = zip(("min", "median", "max"), *(spread(rows, column) for column in COLUMNS))
    summary = [dict(zip(["seed", *COLUMNS], line)) for line in summary]
    print(as_table(rows + summary, ["seed", *COLUMNS]))
    result["figures"] = report_figures(learning_figures(args.env_id, rows))
    result["rows"] = rows
    path = args.out / f"reinforce-learning-{args.env_id}.json"
    path.write_text(json.dumps(result, indent=2))
    print(f"written to {path}")
    sys.exit(not all(result["figures"].values()))


if __name__ == "__main__":
    main()
