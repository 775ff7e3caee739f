# SPDX-License-Identifier: Apache-2.0
"""Federated learning where clients differ."""

__version__ = "0.1.0"
