"""Each script is a file to copy: it needs no other, and what several share is the same text."""

import ast
import itertools
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, SCRIPTS, clean_env

# What every algorithm does in its own way
# What each algorithm has its own of; everything else of one name is one text
ITS_OWN = {"Args", "train", "update", "compute_returns", "make_env", "build_agent", "preset_name"}
ITS_OWN |= {"act", "evaluate", "evaluate_and_record"}

every_script = pytest.mark.parametrize("script", SCRIPTS)


def syntax(script):
    return ast.parse((ROOT / f"{script}.py").read_text())


def required():
    """Import names of what requirements.txt installs."""
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    names = {re.split(r"[\[=]", pin)[0] for pin in pins if pin and not pin.startswith("#")}
    return {{"pillow": "PIL"}.get(name, name) for name in names}


@every_script
def test_a_copy_alone_in_an_empty_folder_runs(script, real_run):
    made = real_run(script)  # fails unless it left with 0
    assert (made.folder / "summary.json").exists()


@every_script
def test_imports_are_the_standard_library_and_the_pinned_packages(script):
    imported = set()
    for node in ast.walk(syntax(script)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    # Ray is for --tune-samples alone, which says how to install it
    assert imported - set(sys.stdlib_module_names) - {"ray"} <= required()


def test_importing_has_no_side_effects(tmp_path):
    """No output, files, processes, threads, changed seeds, signal handlers or torch settings."""
    code = f"""
import os, random, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
sys.dont_write_bytecode = True
import gymnasium, numpy, torch, tyro, wandb
def state():
    numpy_state = numpy.random.get_state()
    return (
        torch.get_rng_state().tolist(), numpy_state[1].tolist(), random.getstate(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), threading.active_count(),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        sorted(gymnasium.registry), dict(os.environ), os.getcwd(), sys.excepthook,
    )
before = state()
for script in {SCRIPTS!r}:
    __import__(script)
    assert state() == before, script
    before = state()
assert not os.listdir()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=clean_env(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(SCRIPTS, 2)])
def test_definitions_of_the_same_name_are_the_same_text(one, other):
    """Who has read one script knows these in the next one, and a fix in one is a fix in all."""
    texts = []
    for script in (one, other):
        source = (ROOT / f"{script}.py").read_text()
        nodes = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef))
        texts.append({
            node.name: [ast.get_source_segment(source, d) for d in (*node.decorator_list, node)]
            for node in nodes if node.name not in ITS_OWN
        })  # fmt: skip
    shared = texts[0].keys() & texts[1].keys()
    assert {"Run", "load_checkpoint", "write_whole", "stop_signals", "main"} <= shared
    assert [name for name in sorted(shared) if texts[0][name] != texts[1][name]] == []


@every_script
def test_a_script_imports_no_other(script):
    """Not even lazily, by name: the names of the other files do not occur as modules."""
    names = {node.id for node in ast.walk(syntax(script)) if isinstance(node, ast.Name)}
    assert not names & (set(SCRIPTS) - {script})
