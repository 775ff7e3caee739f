# SPDX-License-Identifier: Apache-2.0
"""Fits that are differentially private for clients: what a budget is spent on, and every method that can do with it."""

__all__: list[str] = []
