"""The command line: options, presets, refusals, and what a run leaves behind."""

import importlib
import json
import os
import pickle
import re
import signal
import struct
import zlib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Sequence, Text
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record

from tests.processes import ROW, SCRIPTS, clean_env, load, read_rows, run, run_folder, tiny

every_script = pytest.mark.parametrize("script", SCRIPTS)


class Odd(gym.Env):
    """Spaces that no script can serve."""

    observation_space, action_space = Box(-1, 1, (2,), np.float32), Text(5)

    def __init__(self, render_mode=None, observation_space=None, action_space=None):
        self.observation_space = observation_space or self.observation_space
        self.action_space = action_space or self.action_space

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}


class Plain(Odd):
    """An own environment as people write it: nothing about rendering, no time limit."""

    action_space = Discrete(2)

    def __init__(self):
        self.steps = 0

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps % 7 == 0, False, {}


class Unavailable(Odd):
    def __init__(self, render_mode=None):
        raise ImportError("it needs a package: pip install nosuchpackage")


gym.register("Plain-v0", Plain)
gym.register("Unavailable-v0", Unavailable)
gym.register("TextActions-v0", Odd)
sequences = {"observation_space": Sequence(Discrete(3)), "action_space": Discrete(2)}
gym.register("SequenceObs-v0", Odd, kwargs=sequences)


def tree(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}


# --------------------------------------------------------------------------------------- options


@every_script
def test_flags_have_two_forms_and_take_no_value(script, capsys):
    parse_args = importlib.import_module(script).parse_args
    assert parse_args([]).deterministic
    assert parse_args(["--deterministic"]).deterministic
    assert not parse_args(["--no-deterministic"]).deterministic
    for wrong in (["--deterministic", "False"], ["--deterministic=False"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as stop:
            parse_args(wrong)
        assert stop.value.code == 2


@every_script
def test_numbers_and_spellings(script, capsys):
    parse_args = importlib.import_module(script).parse_args
    assert parse_args(["--total-timesteps", "100_000"]).total_timesteps == 100_000
    assert parse_args(["--total_timesteps=100000"]).total_timesteps == 100_000
    assert parse_args(["--seed", "3", "--seed", "4"]).seed == 4  # the last one counts
    for wrong in ("1e5", "many", "None", ""):
        with pytest.raises(SystemExit) as stop:
            parse_args(["--total-timesteps", wrong])
        assert stop.value.code == 2


@pytest.mark.parametrize(
    ("script", "option"), [("ppo", "target_kl"), ("reinforce", "clip_coef")]
)
def test_options_that_may_be_none(script, option):
    parse_args = importlib.import_module(script).parse_args
    flag = "--" + option.replace("_", "-")
    assert getattr(parse_args([flag, "None"]), option) is None
    assert getattr(parse_args([flag, "0.02"]), option) == 0.02


@pytest.mark.parametrize("script", ["reinforce", "ppo"])
def test_hidden_sizes_take_several_numbers(script):
    parse_args = importlib.import_module(script).parse_args
    assert parse_args(["--hidden-sizes", "32", "16", "8"]).hidden_sizes == (32, 16, 8)
    assert parse_args(["--hidden-sizes", "32"]).hidden_sizes == (32,)


def preset(script):
    """An environment with a preset, and an option that the preset changes."""
    module = importlib.import_module(script)
    for name, options in module.PRESETS.items():
        for option, value in options.items():
            if value != getattr(module.Args, option):
                return f"{name}-v1", option, value
    raise AssertionError(f"{script}.py has no preset that changes anything")


@every_script
def test_what_is_typed_wins_over_the_preset_and_that_over_the_defaults(script):
    module = importlib.import_module(script)
    env_id, option, value = preset(script)
    assert getattr(module.parse_args([]), option) in (getattr(module.Args, option), value)
    for spelling in (["--env-id", env_id], [f"--env_id={env_id}"], ["--env-id", f"a.b:{env_id}"]):
        assert getattr(module.parse_args(spelling), option) == value
        typed = [*spelling, "--" + option.replace("_", "-"), str(value * 2)]
        assert getattr(module.parse_args(typed), option) == value * 2
    assert getattr(module.parse_args(["--env-id", "Other-v1"]), option) == getattr(
        module.Args, option
    )


@every_script
def test_help_names_the_preset_and_explains_every_option(script, capsys):
    module = importlib.import_module(script)
    env_id, _, value = preset(script)
    with pytest.raises(SystemExit) as stop:
        module.parse_args(["--env-id", env_id, "--help"])
    assert stop.value.code == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert f"preset {env_id.removesuffix('-v1')}" in shown
    assert f"(default: {value})" in re.sub(r"[\s│|]+", " ", shown)
    for name in module.Args.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in shown
    source = Path(module.__file__).read_text()
    fields = source[source.index("class Args") : source.index("@property")]
    options = [line for line in fields.splitlines() if re.match(r"    \w+: ", line)]
    # A Literal's values say what it is
    assert [line for line in options if "  # " not in line and "Literal" not in line] == []


# -------------------------------------------------------------------------------------- refusals


def refused(script, arguments, cwd, monkeypatch, capfd):
    """Runs main(): exit code 2, one line, nothing created. Returns the line."""
    for name in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(cwd / "nobody"))
    monkeypatch.chdir(cwd)
    monkeypatch.setattr("sys.argv", [f"{script}.py", *arguments])
    before, handler = tree(cwd), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(script).main()
    signal.signal(signal.SIGTERM, handler)
    captured = capfd.readouterr()
    assert stop.value.code == 2, captured.err
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"{script}.py: ")
    assert {path for path in tree(cwd) - before if not path.startswith("nobody")} == set()
    return line


@every_script
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--env-id LunarLandr-v3", "no such environment did you mean LunarLander-v3"),
        ("--env-id CartPole-v9", "CartPole-v9 no such environment CartPole-v1"),
        ("--env-id nosuchmodule:X-v0", "nosuchmodule:X-v0"),
        ("--env-id in:valid:id-v0", "--env-id in:valid:id-v0"),
        ("--env-id ?!", "--env-id ?!"),
        ("--env-id Unavailable-v0", "Unavailable-v0 pip install nosuchpackage"),
        ("--env-id TextActions-v0", "Text action"),
        ("--env-id SequenceObs-v0", "Sequence observation"),
        ("--total-timesteps 0", "--total-timesteps 1"),
        ("--num-envs -3", "--num-envs 1"),
        ("--eval-episodes 0", "--eval-episodes 1"),
        ("--save-every 0", "--save-every 1"),
        ("--gamma 1.01", "--gamma 0 1"),
        ("--gamma nan", "--gamma 0 1"),
        ("--learning-rate nan", "--learning-rate"),
        ("--learning-rate -1", "--learning-rate"),
        ("--seed -1", "--seed"),
        ("--seed 99999999999999999999", "--seed"),
        ("--device nonsense", "--device nonsense"),
        ("--wandb-mode online", "--wandb-mode online"),
        ("--wandb-project a/b", "--wandb-project a/b"),
        ("--evaluate missing.pt", "missing.pt no such checkpoint"),
        ("--resume missing.pt", "missing.pt no such checkpoint"),
        ("--resume .", "not a checkpoint"),
    ],
)
def test_what_the_user_can_fix_is_said_in_one_line(
    script, options, words, tmp_path, monkeypatch, capfd
):
    line = refused(script, tiny(script, options), tmp_path, monkeypatch, capfd)
    assert [word for word in words.split() if word not in line] == [], line


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("ppo", "--num-envs 2 --num-steps 4 --num-minibatches 9", "--num-minibatches 9 8"),
        ("ppo", "--num-workers -1", "--num-workers"),
        ("ppo", "--hidden-sizes 8 0", "--hidden-sizes 0"),
        ("reinforce", "--num-envs 1", "--num-envs 1 --no-baseline"),
        ("reinforce", "--hidden-sizes 8 0", "--hidden-sizes"),
        ("dreamer_actor_loss", "--size enormous", "--size enormous tiny"),
        ("dreamer_actor_loss", "--replay-capacity 5", "--replay-capacity --batch-length"),
        ("dreamer_actor_loss", "--total-timesteps 10", "--total-timesteps --learning-starts"),
        ("dreamer_actor_loss", "--deter 9 --blocks 2", "--deter --blocks"),
    ],
)
def test_impossible_arithmetic_is_refused(script, options, words, tmp_path, monkeypatch, capfd):
    line = refused(script, tiny(script, options), tmp_path, monkeypatch, capfd)
    assert [word for word in words.split() if word not in line] == [], line


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


@every_script
@pytest.mark.parametrize("option", ["--evaluate", "--resume"])
def test_files_that_are_no_checkpoints(script, option, tmp_path, monkeypatch, capfd):
    torch.save({"script": "another", "args": {}}, tmp_path / "foreign.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    torch.save({"script": script, "bomb": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "text.pt").write_text("not a model\n" * 100)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"script": script}, protocol=2))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "foreign.pt").read_bytes()[:-50])
    for name in ("foreign", "tensor", "bomb", "text", "empty", "pickle", "cut"):
        path = f"{name}.pt"
        line = refused(script, tiny(script, f"{option} {path}"), tmp_path, monkeypatch, capfd)
        assert f"{path}: not a checkpoint" in line


# --------------------------------------------------------------------- what a run leaves behind

FILES = {
    "args.json", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "episode.gif",
    "learning_curve.png",
}  # fmt: skip
SUMMARY = {
    "env_id", "seed", "global_step", "seconds", "sps", "return_mean_100", "best_return_mean",
    "eval_return_mean", "eval_return_std", "eval_episodes", "solved_step", "solved_seconds",
    "versions",
}  # fmt: skip
CHARTS = {
    "charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate",
}  # fmt: skip
LOSSES = {
    "reinforce": {"losses/policy_loss", "losses/entropy"},
    "ppo": {
        f"losses/{name}" for name in
        ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance")
    },
    "dreamer_actor_loss": {"world/", "actor/", "critic/"},
}  # fmt: skip


def wandb_records(path):
    """The records of a .wandb file (LevelDB's log format); raises if it is cut or damaged."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        checksum, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, part = parts + data[at + 7 : at + 7 + size], data[at + 6 : at + 7 + size]
        assert zlib.crc32(part) == checksum
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
    assert at == len(data) and not parts


def wandb_file(folder):
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return path


@every_script
def test_a_run_leaves_every_file_and_nothing_else(script, real_run):
    made = real_run(script)
    assert tree(made.cwd) >= {f"{script}.py", "runs"}
    assert {path.name for path in made.cwd.iterdir()} <= {f"{script}.py", "runs", "__pycache__"}
    assert {path.name for path in made.folder.iterdir()} == FILES | {"wandb"}
    assert re.fullmatch(rf"CartPole-v1__{script}__1__\d{{8}}-\d{{6}}.*", made.folder.name)


@every_script
def test_summary_arguments_and_rows_agree(script, real_run):
    folder = real_run(script).folder
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY
    assert (summary["env_id"], summary["seed"], summary["eval_episodes"]) == ("CartPole-v1", 1, 4)
    assert summary["global_step"] == 512 and summary["seconds"] > 0 and summary["sps"] > 0
    assert summary["solved_step"] is None and summary["solved_seconds"] is None
    arguments = json.loads((folder / "args.json").read_text())
    assert arguments["env_id"] == "CartPole-v1" and arguments["total_timesteps"] == 512
    assert set(arguments) == set(importlib.import_module(script).Args.__dataclass_fields__)
    rows = read_rows(folder)
    assert [row["global_step"] for row in rows] == list(range(ROW, 512 + ROW, ROW))
    names = set().union(*rows)
    assert names >= CHARTS
    assert [name for name in LOSSES[script] if not any(n.startswith(name) for n in names)] == []
    assert rows[-1]["charts/return_mean_100"] == pytest.approx(summary["return_mean_100"])
    for name in ("last.pt", "best.pt"):
        assert load(folder / name)["script"] == script


@every_script
def test_best_is_the_checkpoint_with_the_best_mean_of_the_latest_episodes(script, tmp_path):
    module = importlib.import_module(script)
    assert (10 if script == "dreamer_actor_loss" else 100) == module.BEST_OF
    args = module.Args(runs_dir=str(tmp_path), wandb_mode="disabled")
    with module.Run(args, 100, None, None) as run:
        best = run.folder / "best.pt"

        def saved_as_best(step, *returns):
            run.log(step, [(value, 1) for value in returns], {})
            run.save({"agent": step}, final=False)
            return best.exists() and load(best)["agent"] == step and load(best)["progress"]

        assert not saved_as_best(1, *[5.0] * (module.BEST_OF - 1))  # too few to tell
        assert saved_as_best(2, 5.0)["best_mean"] == 5
        assert not saved_as_best(3, 4.9)
        assert not saved_as_best(4, *[4.9] * 30)
        assert saved_as_best(5, *[6.0] * module.BEST_OF)["best_mean"] == 6
        assert saved_as_best(6, 6.0)  # as good, and trained for longer
    assert load(run.folder / "last.pt")["agent"] == 6


@every_script
def test_pictures_open_and_the_gif_runs_at_the_speed_of_the_environment(script, real_run):
    folder = real_run(script).folder
    with Image.open(folder / "learning_curve.png") as picture:
        picture.load()
    durations = []
    with Image.open(folder / "episode.gif") as gif:
        assert gif.info["loop"] == 0  # for ever
        for number in range(gif.n_frames):
            gif.seek(number)
            durations.append(gif.info["duration"])
    # CartPole runs at 50 steps a second; two steps make a frame of 40 ms, equal frames are merged
    assert min(durations) == 40 and all(duration % 40 == 0 for duration in durations)
    assert 8 * 20 <= sum(durations) <= 500 * 20


@every_script
def test_the_last_lines_say_what_came_out_and_where_it_lies(script, real_run):
    made = real_run(script)
    summary = json.loads((made.folder / "summary.json").read_text())
    result, files, tracker = made.out.splitlines()[-3:]
    assert result.startswith("CartPole-v1: 4 greedy episodes, return ")
    assert f"return {summary['eval_return_mean']:.1f} +- {summary['eval_return_std']:.1f}" in result
    assert files.endswith(f"runs/{made.folder.name}")
    leet, sync = re.fullmatch(r"W&B: wandb leet (\S+), or wandb sync (\S+)", tracker).groups()
    assert leet == sync and (made.cwd / leet / wandb_file(made.folder).name).exists()
    assert "Traceback" not in made.err and "wandb:" not in made.err


@every_script
def test_the_wandb_run_is_whole_and_holds_charts_model_and_gif(script, real_run):
    folder = real_run(script).folder
    records = list(wandb_records(wandb_file(folder)))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert kinds[-1] == "exit" and records[-1].exit.exit_code == 0
    (started,) = (record.run for record in records if record.HasField("run"))
    assert started.display_name == folder.name
    assert started.run_id == load(folder / "last.pt")["wandb_id"]
    history, steps = {}, []
    for record in records:
        if record.HasField("history"):
            items = record.history.item
            history |= {item.key or item.nested_key[0]: item.value_json for item in items}
            steps.append(record.history.step.num)
    rows = read_rows(folder)
    assert steps == sorted(steps) and set(steps) == {row["global_step"] for row in rows}
    assert set(history) >= set(rows[-1]) - {"global_step"}
    assert set(history) >= {"eval/return_mean", "eval/return_std", "eval/episode"}
    assert [*folder.glob("wandb/offline-run-*/files/media/videos/**/*.gif")]
    (model,) = (record.artifact for record in records if record.HasField("artifact"))
    assert model.type == "model" and model.name == folder.name
    assert [entry.path for entry in model.manifest.contents] == ["best.pt"]


@every_script
def test_names_with_unsafe_characters(script, tmp_path):
    """An id with : in it, and a folder with spaces: one run folder, a valid artifact."""
    env_id = "tests.probes:ObsAction-v0"
    run(script, [*tiny(script, "--wandb-mode offline", env_id=env_id)], tmp_path)
    folder = run_folder(tmp_path)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", folder.name)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    artifacts = [r.artifact for r in wandb_records(wandb_file(folder)) if r.HasField("artifact")]
    assert [artifact.name for artifact in artifacts] == [folder.name]
    assert json.loads((folder / "summary.json").read_text())["env_id"] == env_id


@pytest.mark.parametrize("script", ["ppo", "reinforce"])
def test_a_retired_environment_is_replaced_and_said_once(script, tmp_path):
    done = run(script, tiny(script, total_timesteps=128, env_id="LunarLander-v2"), tmp_path)
    assert done.err.count("LunarLander-v2") == 1
    folder = run_folder(tmp_path)
    assert folder.name.startswith("LunarLander-v3__") and "LunarLander-v3: 4 greedy" in done.out
    for name in ("args.json", "summary.json"):
        assert json.loads((folder / name).read_text())["env_id"] == "LunarLander-v3"
    assert "wandb" not in {path.name for path in folder.iterdir()}  # disabled: none of its files
    again = run(script, ["--evaluate", str(folder / "best.pt")], tmp_path)
    assert "LunarLander-v2" not in again.err


@every_script
def test_an_environment_that_cannot_be_drawn_costs_only_the_gif(script, tmp_path):
    arguments = tiny(script, "--wandb-mode offline", env_id="tests.test_cli:Plain-v0")
    done = run(script, arguments, tmp_path)
    folder = run_folder(tmp_path)
    assert {path.name for path in folder.iterdir()} == FILES - {"episode.gif"} | {"wandb"}
    assert "no GIF" in done.err and "Traceback" not in done.err
    assert json.loads((folder / "summary.json").read_text())["eval_return_mean"] == 7


# ---------------------------------------------------------------------------- evaluate and resume


@every_script
def test_evaluate_plays_the_model_that_the_run_played(script, real_run, tmp_path):
    made = real_run(script)
    (tmp_path / "best.pt").write_bytes((made.folder / "best.pt").read_bytes())
    done = run(script, ["--evaluate", "best.pt"], tmp_path)
    assert done.out.splitlines()[0] == made.out.splitlines()[-3]  # same seeds, same episodes
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", "evaluation.gif"}
    with Image.open(tmp_path / "evaluation.gif") as gif:
        assert gif.n_frames >= 2
    options = "--evaluate best.pt --eval-episodes 7 --no-deterministic"
    done = run(script, options.split(), tmp_path)
    assert done.out.startswith("CartPole-v1: 7 sampled episodes, return ")


@every_script
def test_evaluate_refuses_an_environment_that_the_model_does_not_fit(
    script, real_run, tmp_path, monkeypatch, capfd
):
    path = real_run(script).folder / "best.pt"
    arguments = ["--evaluate", str(path), "--env-id", "Acrobot-v1"]
    line = refused(script, arguments, tmp_path, monkeypatch, capfd)
    assert "does not fit" in line


@every_script
def test_resume_continues_rows_checkpoints_and_the_wandb_run(script, tmp_path):
    run(script, tiny(script, "--wandb-mode offline", 256), tmp_path)
    folder = run_folder(tmp_path)
    first, rows = load(folder / "last.pt"), read_rows(folder)
    arguments = ["--resume", str(folder / "last.pt"), "--total-timesteps", "512"]
    done = run(script, arguments, tmp_path)
    assert run_folder(tmp_path) == folder
    again, more = load(folder / "last.pt"), read_rows(folder)
    assert more[: len(rows)] == rows
    steps = [row["global_step"] for row in more]
    assert steps == list(range(ROW, 512 + ROW, ROW))
    assert again["progress"]["global_step"] == 512
    assert again["progress"]["seconds"] > first["progress"]["seconds"]
    assert again["wandb_id"] == first["wandb_id"] is not None
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{first['wandb_id']}.wandb"] * 2
    logged = [r.history.step.num for r in wandb_records(files[1]) if r.HasField("history")]
    assert min(logged) == 256 + ROW and logged == sorted(logged)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["global_step"] == 512
    known = {name: value for name, value in first["args"].items() if name not in CHANGED}
    assert known == {name: value for name, value in again["args"].items() if name not in CHANGED}
    assert "Traceback" not in done.err
    # All steps are made now: to go on needs more of them
    refused_again = run(script, ["--resume", str(folder / "last.pt")], tmp_path, code=2)
    assert "--total-timesteps" in refused_again.err


CHANGED = {"total_timesteps", "resume"}


@every_script
def test_resume_from_inside_the_folder_and_from_a_copy(script, tmp_path):
    """`--resume last.pt` in the run's folder, where the checkpoint may be all there is."""
    run(script, tiny(script, total_timesteps=256), tmp_path)
    moved = tmp_path / "a copy"
    moved.mkdir()
    (run_folder(tmp_path) / "last.pt").rename(moved / "last.pt")
    arguments = "--resume last.pt --total-timesteps 384 --wandb-mode offline".split()
    run(script, arguments, moved)
    assert {path.name for path in moved.iterdir()} == FILES | {"wandb"}
    assert [row["global_step"] for row in read_rows(moved)] == [256 + ROW, 384]


# ------------------------------------------------------------------------------- every preset works

PRESET_ENVS = {
    "ppo": {
        "CartPole": "CartPole-v1", "Acrobot": "Acrobot-v1", "MountainCar": "MountainCar-v0",
        "MountainCarContinuous": "MountainCarContinuous-v0", "Pendulum": "Pendulum-v1",
        "LunarLander": "LunarLander-v3", "LunarLanderContinuous": "LunarLanderContinuous-v3",
        "BipedalWalker": "BipedalWalker-v3", "MuJoCo": "HalfCheetah-v5", "Hopper": "Hopper-v5",
        "Atari": "ALE/Pong-v5",
    },
    "dreamer_actor_loss": {
        "CartPole": "CartPole-v1", "Pendulum": "Pendulum-v1", "LunarLander": "LunarLander-v3",
    },
}  # fmt: skip


def draw_nothing():
    """Minutes of GIFs, which test_pictures_open... looks at."""
    for script in SCRIPTS:
        importlib.import_module(script).record_gif = lambda *_: None


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script in PRESET_ENVS for name in PRESET_ENVS[script]]
)
def test_a_preset_trains_for_an_iteration_and_is_named(script, name, tmp_path):
    """With all of the preset's settings: two iterations, so that a second one sees their effect."""
    module = importlib.import_module(script)
    env_id = PRESET_ENVS[script][name]
    args = module.parse_args(["--env-id", env_id])
    dreamer = script == "dreamer_actor_loss"
    steps = args.learning_starts + 100 if dreamer else args.batch_size + 1
    few = f"--total-timesteps {steps} --eval-episodes 1 --wandb-mode disabled"
    if name == "Atari":
        few += " --num-steps 16 --no-deterministic"  # greedy, the untrained one waits for ever
    done = run(script, ["--env-id", env_id, *few.split()], tmp_path, draw_nothing)
    assert f"{env_id} (preset {name}), seed 1" in done.err
    folder = run_folder(tmp_path)
    used = json.loads((folder / "args.json").read_text())
    shortened = {"total_timesteps", "num_steps", "eval_episodes"}
    kept = {key: value for key, value in module.PRESETS[name].items() if key not in shortened}
    assert {key: used[key] for key in kept} == kept
    assert json.loads((folder / "summary.json").read_text())["eval_return_mean"] is not None
    assert read_rows(folder)[-1]["global_step"] >= steps


@pytest.mark.parametrize("script", PRESET_ENVS)
def test_every_preset_is_tried(script):
    assert set(PRESET_ENVS[script]) == set(importlib.import_module(script).PRESETS)
