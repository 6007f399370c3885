"""--tune-samples: a search with Ray Tune that is killed, and ends by the same command."""

import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import ppo
from tests.processes import (
    ROW,
    clean_env,
    load,
    read_rows,
    run,
    shared_memory,
    shared_memory_left,
    start,
    tiny,
    wait_until,
)  # fmt: skip
from tests.test_cli import refused, tree, wandb_records

MARK = "TUNE_TEST_MARK"
OPTIONS = "--tune-samples 2 --tune-workers 1 --num-workers 0 --wandb-mode offline"
STEPS = 8_000  # long enough to be killed on the way
COMMAND = tiny("ppo", OPTIONS, total_timesteps=STEPS)
RERUNS = [f"-seed-{seed}" for seed in (2, 3, 4)]


def set_mark(mark):
    """Whatever this process starts inherits it, in whatever session it lives."""
    os.environ[MARK] = mark


def marked(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                found.append((int(path.name), (path / "cmdline").read_text().split("\0")))
        except OSError:  # it ended meanwhile
            continue
    return found


def left(mark, but=" "):
    """What is still there after a while, apart from processes whose name begins with but."""

    def others():
        return [words for _, words in marked(mark) if not words[0].startswith(but)]

    wait_until(lambda: not others(), 90, 0.1)
    return others()


def temporary():
    return set(Path("/tmp").glob("ray-*"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A tuning that was killed in the first trial, and terminated after it."""
    cwd, before, others = tmp_path_factory.mktemp("tuned"), shared_memory(), temporary()
    began, mark = time.monotonic(), str(os.getpid())
    first = start("ppo", COMMAND, cwd, functools.partial(set_mark, mark))
    folder = cwd / "runs/CartPole-v1__ppo-tune__1"
    assert wait_until(lambda: [*folder.glob("trial-001/*/last.pt")] or not first.running(), 300)
    for pid, words in marked(mark):
        if "--runs-dir" in words:  # else the trial might reach its end before its end is told
            os.kill(pid, signal.SIGSTOP)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first.err
    assert left(mark, but="ray::") == []  # Ray's agents look for their parent every few seconds
    steps = load(next(folder.glob("trial-001/*/last.pt")))["progress"]["global_step"]
    for path in temporary() - others:  # Ray's own logs; nothing else can remove them after a kill
        shutil.rmtree(path)
    second = start("ppo", COMMAND, cwd, functools.partial(set_mark, mark))
    assert wait_until(lambda: "trial-001 finished" in second.read("err"), 300), second.read("err")
    os.kill(second.pid, signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM, second.err
    assert second.err.splitlines()[-1] == "stopped; the same command continues"
    assert left(mark) == [] and temporary() <= others
    assert not (folder / "ray").exists()
    done = start("ppo", COMMAND, cwd, functools.partial(set_mark, mark))
    assert done.wait(300) == 0, done.err
    assert left(mark) == [] and temporary() <= others
    assert not shared_memory_left(before)
    print(f"{time.monotonic() - began:.0f} s\n{done.out}\n{done.err}")
    return SimpleNamespace(cwd=cwd, folder=folder, out=done.out, err=done.err, steps=steps)


def test_the_same_command_continues_what_was_killed(tuned):
    assert 0 < tuned.steps < STEPS
    starts = (tuned.folder / "trial-001/output.txt").read_text().splitlines()
    assert [("(resumed)" in line) for line in starts if "seed 1: " in line] == [False, True]
    (made,) = tuned.folder.glob("trial-001/CartPole*")
    steps = [row["global_step"] for row in read_rows(made)]
    assert steps == [*range(ROW, STEPS + ROW, ROW)]
    assert (made / "summary.json").exists()


def test_table_and_picture(tuned):
    result = json.loads((tuned.folder / "tuning.json").read_text())
    trials = {row["trial"]: row for row in result["trials"]}
    assert sorted(trials) == ["trial-001", "trial-002"]
    assert trials["trial-001"]["status"] == "finished"
    assert trials["trial-002"]["status"] in ("finished", "stopped")
    header, *lines = (line.split() for line in tuned.out.splitlines()[:3])
    assert header == ["trial", "status", "return", "global_step", *ppo.SEARCH]
    drawn = ppo.draw_trials(ppo.parse_args(COMMAND))
    for line, row in zip(lines, result["trials"]):
        assert [line[0], line[1], line[3]] == [row["trial"], row["status"], str(row["global_step"])]
        assert float(line[2]) == pytest.approx(row["return"], rel=1e-3)
        assert [*map(float, line[4:])] == [row[name] for name in ppo.SEARCH]
        assert all(getattr(drawn[row["trial"]], name) == row[name] for name in ppo.SEARCH)
        (made,) = tuned.folder.glob(f"{row['trial']}/CartPole*")
        assert json.loads((made / "args.json").read_text()).items() >= {
            name: row[name] for name in ppo.SEARCH
        }.items()
    assert result["winner"] == result["trials"][0]["trial"]
    with Image.open(tuned.folder / "tuning.png") as picture:
        picture.load()
    for name in trials:  # a line for each as it ends
        assert tuned.err.count(f"{name} {trials[name]['status']} at step ") == 1
    assert "Traceback" not in tuned.err and "ray" not in tuned.err.lower().replace("/ray", "")


def test_nothing_else_is_left(tuned):
    winner = json.loads((tuned.folder / "tuning.json").read_text())["winner"]
    trials = {"trial-001", "trial-002", *(winner + rerun for rerun in RERUNS)}
    names = {path.name for path in tuned.folder.iterdir()}
    assert names == {"args.json", "tuning.json", "tuning.png", *trials}
    assert tree(tuned.cwd) >= {"runs"} and len([*tuned.cwd.glob("[!.]*")]) == 1
    assert not [path for path in tree(tuned.cwd) if path.endswith(".tmp")]
    ran = (tuned.folder / f"{winner}-seed-2/output.txt").read_text()
    assert "Traceback" not in ran and "seed 2: " in ran


def test_each_trial_is_a_run_of_wandb_in_one_group(tuned):
    ids = {}
    for folder in (path for path in tuned.folder.iterdir() if path.is_dir()):
        for file in folder.glob("*/wandb/offline-run-*/run-*.wandb"):
            if file.parent == min(tuned.folder.glob("trial-001/*/wandb/offline-run-*")):
                continue  # cut where it was killed; the second part has the same id
            (started,) = (r.run for r in wandb_records(file) if r.HasField("run"))
            assert started.run_group == tuned.folder.name
            assert ids.setdefault(started.run_id, folder.name) == folder.name
    assert len(ids) == len(set(ids.values())) == 5
    for name in set(ids.values()) - {"trial-001", "trial-002"}:  # which were interrupted
        assert len([*tuned.folder.glob(f"{name}/*/wandb/offline-run-*")]) == 1


def test_the_winner_is_run_again_by_the_command_that_is_printed(tuned, tmp_path):
    result = json.loads((tuned.folder / "tuning.json").read_text())
    assert [summary["seed"] for summary in result["evaluations"]] == [2, 3, 4]
    for summary in result["evaluations"]:
        mean, std = summary["eval_return_mean"], summary["eval_return_std"]
        assert f"seed {summary['seed']}: 4 episodes, return {mean:.1f} +- {std:.1f}" in tuned.out
    assert "mean of the seeds " in tuned.out
    command = tuned.out.splitlines()[-1]
    assert command == result["command"]
    python, script, *options = shlex.split(command)
    assert (python, script) == ("python", "ppo.py")
    args = ppo.parse_args(options)
    assert args == ppo.draw_trials(ppo.parse_args(COMMAND))[result["winner"]]
    done = run("ppo", [*options, "--seed", "2", "--wandb-mode", "disabled"], tmp_path)
    assert f"return {result['evaluations'][0]['eval_return_mean']:.1f} +- " in done.out


# ------------------------------------------------------------------------- without starting Ray


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "ALE/Pong-v5", "a.b:My-v0"])
@pytest.mark.parametrize("options", [
    "", "--gamma 0.9 --actor-lr 1e-05 --learning-rate 3e-4", "--no-anneal-lr --norm-obs --compile",
    "--hidden-sizes 8 --target-kl 0.1 --num-workers 0", "--hidden-sizes 8 9 10 --total-timesteps 7",
    "--no-norm-reward --clip-reward --value-target returns --wandb-mode disabled",
    "--tune-samples 3 --tune-workers 2 --ray-address auto", "--runs-dir /a/b --no-clip-reward",
])  # fmt: skip
def test_options_make_the_same_arguments(env_id, options):
    args = ppo.parse_args(["--env-id", env_id, *options.split()])
    made = ppo.as_options(args)
    assert ppo.parse_args(made) == args
    assert len(made) <= 2 + len(options.split())  # no more than was typed
    spaces = ppo.dataclasses.replace(args, runs_dir="with space's")
    assert ppo.parse_args(shlex.split(shlex.join(ppo.as_options(spaces)))) == spaces


def test_trials_repeat_differ_and_do_not_depend_on_their_number():
    few, many, other = (
        ppo.draw_trials(ppo.parse_args(f"--learning-rate 0.1 {options}".split()))
        for options in ("--tune-samples 2", "--tune-samples 50", "--tune-samples 2 --seed 2")
    )
    assert few.items() <= many.items() and not few.items() & other.items()
    for name in ppo.SEARCH:
        values = {getattr(trial, name) for trial in many.values()}
        assert len(values) > 40 and max(values) < 1
    assert {trial.learning_rate for trial in many.values()} == {None}  # it would win over both


def test_without_ray_the_line_says_how_to_install_it(tmp_path, monkeypatch, capfd):
    for name in ("ray", "ray.tune", "ray.tune.schedulers"):
        monkeypatch.setitem(sys.modules, name, None)
    line = refused("ppo", COMMAND, tmp_path, monkeypatch, capfd)
    requirements = (Path(ppo.__file__).parent / "tests/requirements.txt").read_text().splitlines()
    (pin,) = (requirement for requirement in requirements if requirement.startswith("ray"))
    assert f"pip install '{pin}'" in line


@pytest.mark.parametrize(("options", "words"), [
    ("--gamma 0.9", "another --gamma"), ("--total-timesteps 70", "another --total-timesteps"),
])  # fmt: skip
def test_other_options_in_the_same_folder_are_refused(
    options, words, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    args = ppo.parse_args(COMMAND)
    folder = ppo.tuning_folder(args)
    more = ppo.dataclasses.replace(args, tune_samples=9, tune_workers=3)
    assert ppo.tuning_folder(more) == folder
    line = refused("ppo", [*COMMAND, *options.split()], tmp_path, monkeypatch, capfd)
    assert str(folder) in line and words in line and "--runs-dir" in line and "--seed" in line


@pytest.mark.parametrize(("options", "words"), [
    ("--env-id Nonsense-v0", "no such environment"), ("--tune-samples 0", "--tune-samples 0"),
    ("--tune-workers 0", "--tune-workers 0"), ("--wandb-mode online", "--wandb-mode online"),
])  # fmt: skip
def test_what_every_trial_would_refuse(options, words, tmp_path, monkeypatch, capfd):
    line = refused("ppo", [*COMMAND, *options.split()], tmp_path, monkeypatch, capfd)
    assert words in line


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_tuning_starts_new_runs(option, real_run, tmp_path, monkeypatch, capfd):
    arguments = [option, str(real_run("ppo").folder / "last.pt"), "--tune-samples", "2"]
    line = refused("ppo", arguments, tmp_path, monkeypatch, capfd)
    assert "--tune-samples" in line and "--resume" in line and "--evaluate" in line


def new_trial(folder, command):
    """The class that Ray runs, without Ray around it."""
    trial_class = ppo.trial_class()
    trial = trial_class.__new__(trial_class)
    trial.setup({"task": {
        "folder": str(folder), "command": command, "options": [],
        "total_timesteps": 512, "env": clean_env(),
    }})  # fmt: skip
    return trial


def test_a_trial_that_crashes_says_why(tmp_path):
    code = "import sys; print('a line', file=sys.stderr); sys.exit('ppo.py: the cause\\n')"
    trial = new_trial(tmp_path / "trial", [sys.executable, "-c", code])
    for report in iter(trial.step, None):
        if report.get("done"):
            break
    assert (report["status"], report["error"]) == ("failed", "ppo.py: the cause")
    trial.cleanup()


def test_a_trial_that_was_over_is_reported_again_row_by_row(real_run, tmp_path):
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "run").symlink_to(real_run("ppo").folder)
    trial, reports = new_trial(folder, ["nothing is started"]), []
    for report in itertools.islice(iter(trial.step, None), 20):
        reports.append(report)
        if report.get("done"):
            break
    rows = read_rows(folder / "run")
    steps = [report["global_step"] for report in reports[:-1]]
    assert steps == [row["global_step"] for row in rows]
    assert reports[-1]["status"] == "finished" and trial.process is None
    for report, row in zip(reports, rows):
        if "charts/return_mean_100" in row:
            assert report["return"] == row["charts/return_mean_100"]


def test_a_trial_ends_with_its_cleanup(tmp_path):
    code = "import time; time.sleep(100)"
    trial = new_trial(tmp_path / "trial", [sys.executable, "-c", code])
    trial.step()
    assert trial.process.poll() is None
    trial.cleanup()
    assert trial.process.poll() == -signal.SIGTERM
