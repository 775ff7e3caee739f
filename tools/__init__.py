# SPDX-License-Identifier: Apache-2.0
"""What writes results/ and the documentation's tables and figures; no part of the package."""
