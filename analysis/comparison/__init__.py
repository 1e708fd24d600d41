"""Which runs are compared, and which are not: the report, `compare`, claims, figures and notebooks all pair runs here.

`policy` says what must match, `exclusions` which runs don't count, `groups` which did the same work. `pairing` pairs
them repeat by repeat. `baseline` compares with one device, `sides` and `two_sides` compare folders or two values of a
key, `gate` decides for continuous integration.
"""
