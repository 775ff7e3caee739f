# SPDX-License-Identifier: Apache-2.0
"""Mixtures as a method: from clients to everybody's mixture, and the mixtures in use."""
