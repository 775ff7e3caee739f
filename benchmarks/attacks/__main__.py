# SPDX-License-Identifier: Apache-2.0
"""Run all attacks, or those whose names begin with a word: one line each, which ends in the refusal."""

import sys
from importlib import import_module
from pkgutil import iter_modules

import benchmarks.attacks as package


def main() -> int:
    """Attack.  -> how many attacks succeeded, or failed in another way than by a refusal"""
    wanted = tuple(sys.argv[1:]) or ("",)
    bad = 0
    for found in sorted(module.name for module in iter_modules(package.__path__) if module.name != "__main__"):
        for name, attack in getattr(import_module(f"{package.__name__}.{found}"), "ATTACKS", {}).items():
            if not f"{found}/{name}".startswith(wanted):
                continue
            try:
                print(f"{found}/{name}: refused: {attack()}", flush=True)
            except Exception as error:  # all others are still to be tried
                bad += 1
                print(f"{found}/{name}: NOT REFUSED: {type(error).__name__}: {error}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
