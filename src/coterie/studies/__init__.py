# SPDX-License-Identifier: Apache-2.0
"""The papers' experiments, each a small file: settings, run, and the paper's numbers beside ours."""
