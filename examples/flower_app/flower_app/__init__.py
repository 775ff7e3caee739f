# SPDX-License-Identifier: Apache-2.0
"""A Flower app whose strategy groups clients that differ."""
