# SPDX-License-Identifier: Apache-2.0
"""Differential privacy for clients: what answers cost, one account of it, and noise that follows from no seed."""

__all__: list[str] = []
