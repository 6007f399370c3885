"""Every command in README.md's code blocks works. Long ones run shortened."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from tests.processes import ROOT, SCRIPTS, TINY, clean_env, run

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]
SETUP = ["python3 -m venv .venv", ". .venv/bin/activate"]
INSTALL = re.compile(r"(?:python -m )?pip install -r (\S+)")


def installed_files(path):
    """A requirements file's lines, those of the files that it includes too."""
    for line in (ROOT / path).read_text().splitlines():
        if line.startswith("-r "):
            yield from installed_files(Path(path).parent / line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            yield line


def test_there_are_commands_and_the_first_two_blocks_do_the_whole_set_up():
    assert len(COMMANDS) >= 6
    first, second = ([line for line in block.splitlines() if line] for block in BLOCKS[:2])
    assert first == [*SETUP, "pip install -r requirements.txt",
                     "python ppo.py --env-id LunarLander-v2"]  # fmt: skip
    assert second == [*SETUP, "pip install -r tests/requirements.txt", "python -m pytest tests"]


@pytest.mark.parametrize("path", sorted({*INSTALL.findall("\n".join(COMMANDS))}))
def test_requirements_pin_exact_versions(path):
    lines = [*installed_files(path)]
    assert len(lines) >= 8
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==\d+(\.\d+)*", line), line
    assert len({re.split(r"[\[=]", line)[0] for line in lines}) == len(lines)


def shortened(script, words, real_run, cwd):
    """The arguments of a README command, with placeholders filled and few steps."""
    if "runs/RUN" in " ".join(words):
        shutil.copytree(real_run(script).folder, cwd / "runs/RUN")
    words = [re.sub(r"^my_\w+(\.\w+)*:MyEnv-v0$", "tests.probes:ObsAction-v0", w) for w in words]
    if "--help" in words:
        return words
    if "--evaluate" in words:
        return [*words, "--eval-episodes", "2"]
    few = "--total-timesteps 600 --eval-episodes 2 --wandb-mode disabled".split()
    if "--resume" in words:
        return [*words, *few]
    return [*words, *TINY[script].split(), *few]


@pytest.mark.parametrize("command", [c for c in dict.fromkeys(COMMANDS) if c not in SETUP])
def test_command(command, real_run, tmp_path):
    if INSTALL.fullmatch(command):
        return  # test_requirements_pin_exact_versions looks into it
    program, *words = shlex.split(command)
    if program == "torchrun":
        ranks, path, *words = words
        words = [ranks, ROOT / path, *shortened("ppo", words, real_run, tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout, done.stderr
        return
    assert program == "python", f"a test should know how to run: {command}"
    if words[:2] == ["-m", "pytest"]:
        # The tests that are running are it; what is left to see is that the path finds them
        assert all((ROOT / word).exists() for word in words[2:] if not word.startswith("-"))
        assert any((ROOT / word).is_dir() for word in words[2:])
        return
    path = ROOT / words[0]
    assert path.is_file(), f"{words[0]} does not exist"
    if "--tune-samples" in words:  # test_tune.py runs one
        assert importlib.import_module(path.stem).parse_args(words[1:]).tune_samples
        return
    if path.stem in SCRIPTS and path.parent == ROOT:
        done = run(path.stem, shortened(path.stem, words[1:], real_run, tmp_path), tmp_path)
        assert done.out
        return
    # A benchmark or another tool: it exists and knows its options
    done = subprocess.run(
        [sys.executable, str(path), *words[1:], "--help"],
        cwd=tmp_path, env=clean_env(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_options_and_files_in_the_text_exist():
    """Whatever README names in backquotes: options, files, scripts."""
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([^`\n]+)`", text)
    options = {
        form
        for script in SCRIPTS
        for name in importlib.import_module(script).Args.__dataclass_fields__
        for form in (f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}")
    }
    named = {word for words in quoted for word in words.split() if word.startswith("--")}
    assert named - options - {"--help"} == set()
    files = {word for word in quoted if re.fullmatch(r"[\w/.-]+\.(py|txt|md)", word)}
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_sweep_makes_arguments_of_the_script():
    """What W&B's agent makes of the block in README, with the script unchanged."""
    text = README[README.index("    method: ") :]
    sweep = yaml.safe_load(text[: text.index("\n\n")])
    _, script, *options, macro = sweep["command"]
    assert macro == "${args_no_boolean_flags}"
    parse_args = importlib.import_module(script.removesuffix(".py")).parse_args
    for flag in (True, False):
        drawn = {"actor_lr": {"value": 1e-05}, "norm_obs": {"value": flag},
                 "no_anneal_lr": {"value": flag}}  # fmt: skip
        assert drawn.keys() == sweep["parameters"].keys()
        made = create_sweep_command_args({"args": drawn})["args_no_boolean_flags"]
        args = parse_args([*options, *made])
        assert (args.actor_lr, args.norm_obs, args.anneal_lr) == (1e-05, flag, not flag)
    made = create_sweep_command_args({"args": {"actor_lr": {"value": 0.001}}})["args"]
    assert made == ["--actor_lr=0.001"] and parse_args(made).actor_lr == 0.001
