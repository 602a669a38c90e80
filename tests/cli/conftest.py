import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "k3-nano"
K3 = pathlib.Path(os.environ.get("K3_TEST_BINARY", ROOT / "build" / "release" / "k3"))


class Result:
    def __init__(self, done):
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr.decode("utf-8", "replace")

    @property
    def text(self):
        return self.out.decode("utf-8")


@pytest.fixture
def k3():
    """Runs the program; environment variables of K3_ do not leak in from outside."""

    def run(*args, stdin=b"", env=None, timeout=120):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("K3_")}
        clean.update(env or {})
        return Result(
            subprocess.run(
                [str(K3), *map(str, args)],
                input=stdin,
                capture_output=True,
                env=clean,
                timeout=timeout,
            )
        )

    return run
