# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a federation, done on purpose with real processes on loopback: each script prints what came of it."""
