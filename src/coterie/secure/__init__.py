# SPDX-License-Identifier: Apache-2.0
"""Sums over nodes of which the server learns the total and nothing else.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017; with neighbours in a
random graph above 32 nodes, Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.

`fixed_point` makes whole numbers of arrays, `shamir` shares secrets, `masks` has the keys and the masks, `graph` says who
masks with whom; `node` and `server` are the two sides. Nothing here knows of engines or algorithms.
"""
