# SPDX-License-Identifier: Apache-2.0
"""Which structure do clients have? All of them under one protocol of held-out rows and held-out clients."""
