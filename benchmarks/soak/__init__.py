# SPDX-License-Identifier: Apache-2.0
"""Kill, damage and crowd run folders, many times, and see whether anything is lost: `python -m benchmarks.soak`."""
