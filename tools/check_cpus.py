# SPDX-License-Identifier: Apache-2.0
"""Run the numerical part of the tests as three kinds of processors would. `make test-cpus`.

torch and MKL choose their kernels by the processor, and results differ in the last digits: no choice may turn on them. With
nothing set they take the best that there is, AVX-512 where the machine has it. Words after the command are for pytest.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = ("ATEN_CPU_CAPABILITY", "MKL_CBWR")
SETTINGS = (("default", "AVX2"), ("avx2", "COMPATIBLE"), (None, None))

# Commands, files, pages, Flower, and the studies, which do on the whole what the tests of their parts do.
NOT_NUMERICAL = (
    "auto", "bad_input*", "*cli", "compare_planted", "compare_text", "config", "dependencies", "docs", "engines_agree",
    "files", "flower_*", "handwriting", "images", "kill_and_resume", "lock", "readers", "report*", "run_folders", "runs",
    "soak", "srpfl_images", "srpfl_linear", "srpfl_speedup", "*studies", "tables",
)  # fmt: skip


def passes(aten: str | None, mkl: str | None) -> bool:
    """Run the tests under one setting; None leaves the choice to the library."""
    chosen = {name: value for name, value in zip(CHOSEN, (aten, mkl), strict=True) if value is not None}
    around = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    print("==", " ".join(f"{name}={chosen.get(name, '(unset)')}" for name in CHOSEN), flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "not study", "--quiet", "--numprocesses", "auto"]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", *sys.argv[1:]]
    command += [f"--ignore-glob=*/test_{name}.py" for name in NOT_NUMERICAL]
    return subprocess.run(command, cwd=ROOT, env={**around, **chosen}, check=False).returncode == 0


def main() -> None:
    """Run under all settings, and fail when tests fail under any."""
    failed = [setting for setting in SETTINGS if not passes(*setting)]
    if failed:
        sys.exit(f"tests fail with {' / '.join(CHOSEN)} = {', '.join(f'{aten} / {mkl}' for aten, mkl in failed)}")
    print("the same under every setting")


if __name__ == "__main__":
    main()
