"""Trains dreamer_actor_loss.py with its presets on several seeds and says which figures hold.

    python tests/benchmarks/dreamer_learning.py --env-id CartPole-v1 --seeds 5
    python tests/benchmarks/dreamer_learning.py --env-id CartPole-v1 --total-timesteps 30000
    python tests/benchmarks/dreamer_learning.py --env-id Pendulum-v1 --seeds 3
    python tests/benchmarks/dreamer_learning.py --env-id LunarLander-v3 --seeds 3

Options that this script does not know go to dreamer_actor_loss.py. One run at a time: seconds are a
result. Every evaluation is 20 fresh episodes with the most likely actions.
"""

import argparse
import json
import sys
from pathlib import Path

from ppo_learning import COLUMNS, ROOT, as_table, measured_on, report_figures, run_process, spread

TARGETS = {  # evaluation, environment steps, minutes (None: only reported)
    "CartPole": (475, 15_000, 15),
    "Pendulum": (-250, 20_000, None),
    "LunarLander": (200, 60_000, None),
}


def run_dreamer(env_id: str, seed: int, folder: Path, options=()) -> tuple[dict, list[dict]]:
    """One training run, as a user would start it; its summary.json and metrics.jsonl."""
    command = [sys.executable, ROOT / "dreamer_actor_loss.py", "--env-id", env_id, "--seed", seed]
    before = set(folder.glob("*/summary.json"))
    run_process([*command, "--runs-dir", folder, *options], timeout=4 * 3600)
    (new,) = set(folder.glob("*/summary.json")) - before
    rows = (new.parent / "metrics.jsonl").read_text().splitlines()
    return json.loads(new.read_text()), [json.loads(row) for row in rows]


def figures(env_id: str, rows: list[dict], curves: list[list[dict]]) -> list[tuple[str, bool]]:
    """What the project promises, with the value that was measured."""
    base, seeds = env_id.split("-v")[0], len(rows)
    if base not in TARGETS:
        return []
    target, budget, minutes = TARGETS[base]
    worst, steps = spread(rows, "eval_return_mean")[0], max(row["global_step"] for row in rows)
    if base == "CartPole" and steps > budget:  # the long run: what was learned stays
        late = [[r["charts/episodic_return"] for r in curve if r["global_step"] > budget
                 and "charts/episodic_return" in r] for curve in curves]  # fmt: skip
        steady = sum(sum(returns) / len(returns) >= target for returns in late)
        means = ", ".join(f"{sum(returns) / len(returns):.0f}" for returns in late)
        text = f"mean after {budget:,} steps >= {target} for 4 of 5: {steady} of {seeds} ({means})"
        return [(text, steady >= 0.8 * seeds)]
    found = [
        (f"evaluation >= {target} for all {seeds} seeds: worst {worst:.1f}", worst >= target),
        (f"within {budget:,} steps: {steps:,}", steps <= budget),
    ]
    slowest = spread(rows, "seconds")[2] / 60
    if minutes:
        found.append((f"within {minutes} minutes: slowest {slowest:.1f}", slowest <= minutes))
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    args, options = parser.parse_known_args()
    result, rows, curves = {"env_id": args.env_id, "options": options, **measured_on()}, [], []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        row, curve = run_dreamer(args.env_id, seed, args.out / f"dreamer-{args.env_id}", options)
        rows.append(row)
        curves.append(curve)
        print(as_table(rows[-1:], ["seed", *COLUMNS]).splitlines()[-1], file=sys.stderr)
    summary = zip(("min", "median", "max"), *(spread(rows, column) for column in COLUMNS))
    summary = [dict(zip(["seed", *COLUMNS], line)) for line in summary]
    print(as_table(rows + summary, ["seed", *COLUMNS]))
    result["figures"] = report_figures(figures(args.env_id, rows, curves))
    result["rows"] = rows
    path = args.out / f"dreamer-learning-{args.env_id}.json"
    path.write_text(json.dumps(result, indent=2))
    print(f"written to {path}")
    sys.exit(not all(result["figures"].values()))


if __name__ == "__main__":
    main()
