# SPDX-License-Identifier: Apache-2.0
"""Build the wheel and use it as strangers do: clean environments, another folder. `make wheel-test`.

Once with the newest versions that pyproject.toml allows, once with the oldest. torch is the same in both, installed first
and by its version, since otherwise pip brings several gigabytes of CUDA along.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command, and end with what it has said when its exit code is not the one that is wanted."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        sys.exit(f"{' '.join(map(str, words))}\nended with {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
    return done


def build(place: Path) -> Path:
    """Build the wheel."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT, cwd=place)
    (wheel,) = place.glob("*.whl")
    return wheel


def about(wheel: Path) -> tuple[str, list[str]]:
    """Read the version, and the lower bounds of what is needed without any extra, as exact versions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(archive.read(name).decode())
    needs = [need for need in said.get_all("Requires-Dist", []) if "extra ==" not in need]
    bounds = [re.fullmatch(r"([\w.-]+)>=([\w.]+)", need.replace(" ", "")) for need in needs]
    if not all(bounds):
        sys.exit(f"each dependency should have one lower bound, like numpy>=1.26; there is {needs}")
    oldest = [f"{bound[1]}=={bound[2]}" for bound in bounds if bound is not None and bound[1] != "torch"]
    return str(said["Version"]), oldest


def install(wheel: Path, exactly: list[str], environment: Path) -> Path:
    """Install the wheel in an environment of its own.  -> its folder of commands"""
    venv.create(environment, with_pip=True)
    commands = environment / ("Scripts" if os.name == "nt" else "bin")
    pip = (commands / "python", "-m", "pip")
    run(*pip, "install", "--quiet", TORCH, cwd=environment)
    run(*pip, "install", "--quiet", wheel, *exactly, cwd=environment)
    run(*pip, "check", cwd=environment)
    return commands


def refused(*words: str | Path, cwd: Path, message: str, hint: str) -> None:
    """Run a command that should end with a sentence and a hint."""
    said = run(*words, cwd=cwd, code=2).stderr.splitlines()
    if len(said) != 2 or said[0] != f"error: {message}" or not said[1].startswith("hint: ") or hint not in said[1]:
        sys.exit(f"{' '.join(map(str, words))} should say '{message}', and '{hint}', but says {said}")


def use(coterie: Path, version: str, folder: Path) -> None:
    """Use what was installed."""
    folder.mkdir()
    if run(coterie, "--version", cwd=folder).stdout != f"coterie {version}\n":
        sys.exit("--version says something else")
    run(coterie, "fit", "--help", cwd=folder)
    run(coterie, "demo", "--out", "demo", cwd=folder)
    rows = [(site, x, (-1) ** site * x + 0.01 * (7 * x % 3)) for site in range(8) for x in range(20)]
    lines = ["site,x,y", *(f"s{site},{x},{y:.3f}" for site, x, y in rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ("--client", "site", "--target", "y", "--clusters", "2", "--out", "fitted", "--json")
    found = json.loads(run(coterie, "fit", "rows.csv", *words, cwd=folder).stdout)
    for written in (folder / "demo" / "report.html", folder / "fitted" / "report.html"):
        if found["method"] != "ifca" or not written.is_file():
            sys.exit(f"the fit says {found}, and {written} should be there")
    refused(coterie, "fit", "--nope", cwd=folder, message="there is no option --nope", hint="`coterie fit --help`")
    refused(coterie, "flower", "demo", cwd=folder, message="Flower is not installed", hint="coterie[flower]")


def main() -> None:
    """Build, install, use."""
    with tempfile.TemporaryDirectory(prefix="coterie-wheel-") as made:
        place = Path(made)
        wheel = build(place)
        version, oldest = about(wheel)
        for name, exactly in (("newest", []), ("oldest", oldest)):
            print(f"{wheel.name} with the {name} dependencies {' '.join(exactly)}".rstrip(), flush=True)
            commands = install(wheel, exactly, place / name)
            use(commands / "coterie", version, place / f"{name}-use")
            listed = json.loads(run(commands / "python", "-m", "pip", "list", "--format", "json", cwd=place).stdout)
            print("  works with " + " ".join(f"{one['name']} {one['version']}" for one in listed), flush=True)


if __name__ == "__main__":
    main()
