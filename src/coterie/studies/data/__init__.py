# SPDX-License-Identifier: Apache-2.0
"""The data of studies: made up, or public images; users' data are read by `coterie.data`."""
