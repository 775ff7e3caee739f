# SPDX-License-Identifier: Apache-2.0
"""Linear models under every structure: fitted and judged by cross-validation within clients, and chosen."""
