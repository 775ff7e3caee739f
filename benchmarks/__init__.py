# SPDX-License-Identifier: Apache-2.0
"""Speed and memory, against the bare arithmetic in the same run. `make bench`, on a quiet machine."""
