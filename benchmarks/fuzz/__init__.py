# SPDX-License-Identifier: Apache-2.0
"""Hand everything that a stranger can hand over to what reads it: `python -m benchmarks.fuzz`.

Every module here has `TARGETS`: by name, a strategy of hypothesis and what is done with each of its values. Nothing but
`coterie.errors.CoterieError` may come out.
"""
