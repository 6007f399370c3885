"""One small real run of each script, shared by the tests that look at what it left behind."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.processes import ROOT, clean_env, run_folder, tiny

real_runs = {}


@pytest.fixture(scope="session")
def real_run(tmp_path_factory):
    """real_run(script): the script copied alone to an empty folder and run there, W&B offline,
    without a home folder's settings and with stdin closed."""

    def get(script):
        if script not in real_runs:
            cwd, home = tmp_path_factory.mktemp(script), tmp_path_factory.mktemp("home")
            shutil.copy(ROOT / f"{script}.py", cwd)
            arguments = tiny(script, "--wandb-mode offline")
            done = subprocess.run(
                ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, f"{script}.py", *arguments],
                cwd=cwd, env=clean_env(HOME=str(home)), capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            real_runs[script] = SimpleNamespace(
                cwd=cwd, code=done.returncode, out=done.stdout, err=done.stderr
            )
        result = real_runs[script]
        assert result.code == 0, result.err
        result.folder = run_folder(result.cwd)
        return result

    return get
