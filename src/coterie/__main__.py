# SPDX-License-Identifier: Apache-2.0
"""`python -m coterie` is `coterie`."""

from coterie.cli.commands import main

main()
