# SPDX-License-Identifier: Apache-2.0
"""What can be fitted: one `Method` for each, what they leave behind, and the only `fit` there is."""
