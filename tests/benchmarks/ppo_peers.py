"""Compares ppo.py with other PPO implementations in alternating runs on this machine.

    python tests/benchmarks/ppo_peers.py solve --peer-python PEERS/bin/python
    python tests/benchmarks/ppo_peers.py speed --peer-python PEERS/bin/python

`solve`: seconds from the start of the process to a training mean (last 100 episodes) at the
environment's reward threshold. `speed`: environment steps per second of the training loop,
learning included. Each pair is one run of ppo.py and one of the peer with the same seed; ratios are
taken pair by pair. PEERS is a virtual environment that README.md says how to make.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from ppo_learning import ROOT, as_table, measured_on, report_figures, run_ppo, run_process

DRIVER = Path(__file__).with_name("ppo_peers_driver.py")
# The least ratios that the project promises: to the fastest peer, and to some peers by name
SOLVE_TARGETS = {"LunarLander-v3": 6.0}
SPEED_TARGETS = {"LunarLander-v3": {"sb3": 3.0, "puffer": 1.4}, "ALE/Pong-v5": {"sb3": 1.3}}


def run_peer(peer: str, seed: int, args) -> dict:
    """One run of the peer's driver: steps, and seconds since its process started."""
    command = [args.peer_python, DRIVER, peer, "--env-id", args.env_id, "--seed", seed]
    command += ["--limit", args.limit, "--workers", args.workers]
    command += ["--stop-when-solved"] if args.figure == "solve" else []
    output, started_at = run_process(command, timeout=3600)
    result = json.loads(output.splitlines()[-1])
    finished_at, solved_at = result["finished_at"], result["solved_at"]
    steps = result["global_step"] - result["loop_started_step"]
    result["sps"] = steps / (finished_at - result["loop_started_at"])
    result["seconds"] = finished_at - started_at
    result["solved_seconds"] = None if solved_at is None else solved_at - started_at
    return result


def ratio_of(ours: dict, theirs: dict, figure: str) -> float:
    """How many times better ours is; where the peer never solved it, than the time it was given."""
    if figure == "speed":
        return ours["sps"] / theirs["sps"]
    if ours["solved_seconds"] is None:
        return 0.0
    return (theirs["solved_seconds"] or theirs["seconds"]) / ours["solved_seconds"]


def compare(peer: str, args) -> list[dict]:
    """Alternating runs, ours first on odd seeds, so that neither always goes first."""
    ours_options = ["--total-timesteps", args.limit] if args.figure == "speed" else []
    if args.env_id.startswith("ALE/"):
        ours_options += ["--eval-episodes", 1]  # minutes that no figure here counts
    rows = []
    for seed in range(1, args.seeds + 1):
        pair = {}
        for name in ("ours", "theirs") if seed % 2 else ("theirs", "ours"):
            time.sleep(args.pause)
            if name == "ours":
                folder = args.out / f"peers-{args.env_id.replace('/', '-')}"
                pair[name] = run_ppo(args.env_id, seed, folder, ours_options)
            else:
                pair[name] = run_peer(peer, seed, args)
        row = {"peer": peer, "seed": seed}
        for name, result in pair.items():
            for key in ("sps", "solved_step", "solved_seconds"):
                row[f"{key}, {name}"] = result[key]
        row["ratio"] = ratio_of(pair["ours"], pair["theirs"], args.figure)
        row["solved by peer"] = "yes" if pair["theirs"]["solved_step"] else "no"
        row["versions"] = pair["theirs"]["versions"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    return rows


def figures_of(rows: list[dict], args) -> list[tuple[str, bool]]:
    figures, medians, speed_targets = [], {}, SPEED_TARGETS.get(args.env_id, {})
    for peer in args.peers:
        ratios = [row["ratio"] for row in rows if row["peer"] == peer]
        medians[peer] = statistics.median(ratios)
        target = speed_targets.get(peer, 0) if args.figure == "speed" else 0
        promise = f", promised {target}" if target else ""
        text = f"{args.figure} ratio to {peer}: median {medians[peer]:.2f}"
        text += f", {min(ratios):.2f} to {max(ratios):.2f}{promise}"
        figures.append((text, medians[peer] >= target))
    own = [peer for peer in args.peers if not peer.endswith("-matched")]
    if args.figure == "solve" and own:  # a peer with our settings is told, and promised nothing
        target, fastest = SOLVE_TARGETS.get(args.env_id, 0), min(own, key=medians.get)
        text = f"times shorter than the fastest peer with its settings, {fastest}"
        text += f": {medians[fastest]:.2f}, promised {target}"
        figures.append((text, medians[fastest] >= target))
    return figures


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=["solve", "speed"])
    parser.add_argument("--peer-python", type=Path, required=True)
    peers = ["sb3", "sbx", "sample-factory", "sample-factory-matched", "puffer", "puffer-matched"]
    parser.add_argument("--peers", nargs="+", default=peers, choices=peers)
    parser.add_argument("--env-id", default="LunarLander-v3", help="CartPole-v1, ALE/Pong-v5 too")
    parser.add_argument("--seeds", type=int, default=5, help="pairs per peer")
    parser.add_argument("--limit", type=int, help="steps of a run (solve: of the peer's)")
    parser.add_argument("--workers", type=int, default=0, help="of puffer and sample-factory")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds of rest before each run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    args = parser.parse_args()
    args.limit = args.limit or (1_000_000 if args.figure == "solve" else 300_000)
    result, rows = {"env_id": args.env_id, "limit": args.limit, **measured_on()}, []
    for peer in args.peers:
        rows += compare(peer, args)
    columns = ["peer", "seed"]
    for key in ("sps",) if args.figure == "speed" else ("solved_step", "solved_seconds"):
        columns += [f"{key}, ours", f"{key}, theirs"]
    print(as_table(rows, [*columns, "solved by peer", "ratio"]))
    result["figures"] = report_figures(figures_of(rows, args))
    result["rows"] = rows
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"peers-{args.figure}-{args.env_id.replace('/', '-')}.json"
    path.write_text(json.dumps(result, indent=2))
    print(f"written to {path}")
    sys.exit(not all(result["figures"].values()))


if __name__ == "__main__":
    main()
