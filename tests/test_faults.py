"""What happens when a run is stopped, killed, starved of disk or fed nonsense.

Whatever it is: `last.pt` is whole, no process and no shared memory is left, the exit code and the
last lines say what was the matter.
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

import ppo
from tests.processes import (
    ROW,
    SCRIPTS,
    clean_env,
    load,
    read_rows,
    run,
    run_folder,
    shared_memory,
    shared_memory_left,
    start,
    tiny,
    wait_until,
)  # fmt: skip
from tests.test_cli import wandb_file, wandb_records

every_script = pytest.mark.parametrize("script", SCRIPTS)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")
ENDLESS = 1_000_000_000  # environment steps: it has to be stopped


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    before = shared_memory()
    yield
    assert not shared_memory_left(before)


def start_and_wait_for(file, script, arguments, cwd):
    process = start(script, arguments, cwd)
    found = wait_until(lambda: not process.running() or [*cwd.glob(f"runs/*/{file}")])
    assert found and process.running(), process.read("err")
    return process


def checkpoint_step(folder):
    return load(folder / "last.pt")["progress"]["global_step"]


def temporary_files(folder):
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


# ------------------------------------------------------------------------------------ asked to stop


@every_script
@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_a_stopped_run_saves_closes_and_says_how_to_go_on(script, number, group, tmp_path):
    """Ctrl-C reaches the whole process group, `kill` the main process, a scheduler either."""
    arguments = tiny(script, "--save-every 1000", ENDLESS)
    process = start_and_wait_for("metrics.jsonl", script, arguments, tmp_path)
    folder = run_folder(tmp_path)
    assert wait_until(lambda: len(read_rows(folder)) >= 3)
    (os.killpg if group else os.kill)(process.pid, number)
    started = time.monotonic()
    assert process.wait() == 128 + number
    assert time.monotonic() - started < 10
    assert process.left_over() == []
    assert checkpoint_step(folder) == read_rows(folder)[-1]["global_step"]
    assert "Traceback" not in process.err
    said = process.err.splitlines()[-1]
    assert f"--resume {folder.relative_to(tmp_path) / 'last.pt'}" in said
    assert temporary_files(folder) == []


@every_script
def test_a_stop_during_start_up_or_evaluation_leaves_nothing_running(script, tmp_path):
    early = start(script, tiny(script, total_timesteps=ENDLESS), tmp_path)
    assert wait_until(lambda: (tmp_path / "runs").exists())
    os.killpg(early.pid, signal.SIGTERM)
    assert early.wait() == 143
    assert early.left_over() == []

    arguments = tiny(script, "--eval-episodes 20000 --runs-dir late", 128)
    late = start(script, arguments, tmp_path)
    assert wait_until(lambda: [*tmp_path.glob("late/*/best.pt")])
    time.sleep(0.5)
    assert late.running()
    os.killpg(late.pid, signal.SIGINT)
    assert late.wait(20) == 130
    assert late.left_over() == [] and "Traceback" not in late.err

    best = str(next(tmp_path.glob("late/*/best.pt")))
    playing = start(script, ["--evaluate", best, "--eval-episodes", "20000"], tmp_path)
    assert not wait_until(lambda: not playing.running(), 1)
    os.killpg(playing.pid, signal.SIGTERM)
    assert playing.wait(20) == 143
    assert playing.left_over() == [] and "Traceback" not in playing.err


@pytest.mark.parametrize("script", ["ppo"])
def test_ctrl_c_finishes_the_wandb_run(script, tmp_path):
    """A real process group with W&B's own process in it, which Ctrl-C reaches as well."""
    arguments = tiny(script, "--wandb-mode offline", ENDLESS)
    process = subprocess.Popen(
        [sys.executable, f"{ppo.__file__}", *arguments], cwd=tmp_path, env=clean_env(),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        assert wait_until(lambda: [*tmp_path.glob("runs/*/last.pt")])
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    folder = run_folder(tmp_path)
    records = list(wandb_records(wandb_file(folder)))
    assert records[-1].HasField("exit")
    logged = [record.history.step.num for record in records if record.HasField("history")]
    assert logged == [row["global_step"] for row in read_rows(folder)]


# ------------------------------------------------------------------------------------------- killed


@every_script
def test_a_run_killed_at_any_moment_can_be_resumed(script, tmp_path):
    """Kills and resumes one run again and again, at random moments, start-up included."""
    kills, moments, save_every = 22 if script == "ppo" else 5, random.Random(1), 2
    arguments = tiny(script, f"--save-every {save_every}", ENDLESS)
    process = start_and_wait_for("last.pt", script, arguments, tmp_path)
    folder, steps = run_folder(tmp_path), [0]
    last = folder / "last.pt"
    for kill in range(kills):
        if kill % 2:  # at any moment; else while it trains, that is: while it saves
            time.sleep(moments.uniform(0, 0.6))
        else:
            wait_until(lambda: len(read_rows(folder)) * ROW > steps[-1] + ROW)
            time.sleep(moments.uniform(0, 0.02))
        os.kill(process.pid, signal.SIGKILL)  # the main process alone: workers must notice
        assert process.wait() == -signal.SIGKILL, process.err
        assert process.left_over() == []
        steps.append(checkpoint_step(folder))  # it is whole
        rows = [row["global_step"] for row in read_rows(folder)]
        assert rows == list(range(ROW, rows[-1] + ROW, ROW))  # no gap, no step twice
        assert steps[-2] <= steps[-1] <= rows[-1] <= steps[-1] + save_every * ROW
        process = start(script, ["--resume", str(last)], tmp_path)
    assert steps[-1] > steps[1] > 0
    assert len(set(steps)) > kills // 3
    # After all this it still comes to a regular end
    assert wait_until(lambda: checkpoint_step(folder) > steps[-1])
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 143
    run(script, ["--resume", str(last), "--total-timesteps", str(checkpoint_step(folder) + 1)],
        tmp_path)  # fmt: skip
    rows = [row["global_step"] for row in read_rows(folder)]
    assert rows == sorted(set(rows))
    assert json.loads((folder / "summary.json").read_text())["global_step"] == rows[-1]
    assert temporary_files(folder) == []


def test_a_killed_worker_ends_the_run_with_its_cause(tmp_path):
    process = start_and_wait_for("last.pt", "ppo", tiny("ppo", "", ENDLESS), tmp_path)
    workers = set(process.members()) - {process.pid}
    assert len(workers) == 2
    os.kill(workers.pop(), signal.SIGKILL)
    assert process.wait(20) == 1
    assert process.left_over() == []
    (line,) = process.err.splitlines()[1:]  # after the one that says where the files are
    assert line == "ppo.py: an environment worker died (exit code -9)"
    assert checkpoint_step(run_folder(tmp_path)) > 0


# ------------------------------------------------------------------------- environments that break

# Two environments and windows of two steps, so that the checkpoint of step 4 exists at step 5
WINDOWS = {
    "reinforce": "--num-envs 2 --num-steps 2",
    "ppo": "--num-envs 2 --num-steps 2 --num-workers 2",
    "dreamer_actor_loss": "--num-envs 2 --log-every 4",
}


def run_to_the_fifth_step(script, probe, cwd):
    options = f"{WINDOWS[script]} --save-every 1"
    return run(script, tiny(script, options, ENDLESS, f"tests.probes:{probe}-v0"), cwd, code=1)


@every_script
@pytest.mark.parametrize(("probe", "name"), [("NaNReward", "reward"), ("NaNObs", "observation")])
def test_a_value_that_is_not_finite_stops_the_run_and_is_named(script, probe, name, tmp_path):
    done = run_to_the_fifth_step(script, probe, tmp_path)
    assert done.left_over() == []
    line = done.err.splitlines()[-1]
    assert line.startswith(f"{script}.py: ") and "Traceback" not in done.err
    assert re.search(rf"(non-finite|not finite).*{name}|{name}.*(non-finite|not finite)", line)
    assert re.search(r"environment [01]\b", line)
    folder = run_folder(tmp_path)
    assert checkpoint_step(folder) == 4 * 2  # the one before the fifth step of both
    assert not (folder / "summary.json").exists() and temporary_files(folder) == []


@every_script
def test_an_exception_in_an_environment_is_shown_with_its_place(script, tmp_path):
    done = run_to_the_fifth_step(script, "Failing", tmp_path)
    assert done.left_over() == []
    assert "this environment breaks on purpose" in done.err
    assert "probes.py" in done.err and "in step" in done.err  # its traceback
    if script == "ppo":
        assert "environment 0 failed" in done.err
        assert done.err.count("Traceback") == 1  # not ours on top of it
    assert checkpoint_step(run_folder(tmp_path)) == 4 * 2


# --------------------------------------------------------------------------------------------- disk


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))


@every_script
def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(script, tmp_path):
    wide = {"dreamer_actor_loss": "--units 64"}.get(script, "--hidden-sizes 32")
    run(script, tiny(script, wide, 128), tmp_path)
    folder = run_folder(tmp_path)
    before = (folder / "last.pt").read_bytes()
    assert len(before) > 6_000
    arguments = ["--resume", str(folder / "last.pt"), "--total-timesteps", "1024"]
    done = run(script, [*arguments, "--save-every", "1"], tmp_path, limit_file_size, code=1)
    assert done.left_over() == []
    assert done.err.splitlines()[-1] == f"{script}.py: [Errno 27] File too large"
    assert "Traceback" not in done.err
    assert (folder / "last.pt").read_bytes() == before
    assert temporary_files(folder) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte; only root may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path / "disk")]
    (tmp_path / "disk").mkdir()
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True).returncode == 0:
            yield tmp_path / "disk"
            subprocess.run(["umount", "-l", command[-1]], check=True)
            return
    pytest.skip("needs the right to mount a file system")


@pytest.mark.parametrize(
    ("script", "mode"), [*((script, "disabled") for script in SCRIPTS), ("ppo", "offline")]
)
def test_a_disk_that_fills_up(script, mode, small_disk):
    """Somebody else takes all the room while the run goes on."""
    arguments = tiny(script, f"--save-every 1 --wandb-mode {mode}", ENDLESS)
    process = start_and_wait_for("last.pt", script, arguments, small_disk)
    with contextlib.suppress(OSError), open(small_disk / "other", "wb", buffering=0) as other:
        while True:
            other.write(b"0" * 1024)
    assert process.wait(60) == 1
    assert process.left_over() == []
    assert process.err.splitlines()[-1:] in (
        [], [f"{script}.py: [Errno 28] No space left on device"]
    )  # fmt: skip  # (what it says may find no room either: its output is on the same disk)
    assert checkpoint_step(run_folder(small_disk)) > 0
    assert temporary_files(run_folder(small_disk)) == []


@pytest.mark.parametrize("broken", ["write_bytes", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_no_temporary_one(broken, tmp_path, monkeypatch):
    file = tmp_path / "last.pt"
    ppo.write_whole(file, b"old")

    def fail(path, *_):
        with open(path, "ab") as half:
            half.write(b"half")
        raise OSError("disk on fire")

    monkeypatch.setattr(type(file), broken, fail)
    with pytest.raises(OSError, match="on fire"):
        ppo.write_whole(file, b"new and longer")
    monkeypatch.undo()
    assert file.read_bytes() == b"old" and [*tmp_path.iterdir()] == [file]
    ppo.write_whole(file, b"new")
    assert file.read_bytes() == b"new" and [*tmp_path.iterdir()] == [file]
