# SPDX-License-Identifier: Apache-2.0
"""Run folders: how they are begun, continued, finished and read, the tables in them, and what is shown of them."""
