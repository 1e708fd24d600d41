"""Which runs are compared, and which are not: the report, `compare`, claims, figures and notebooks all pair runs here.

`work` says what defines a run and which runs did the same, `issues` what blocks and limits comparisons, `exclusions`
which runs don't count; the words of both are in `notes`. `pairing` pairs runs repeat by repeat, and `speed` gives the
verdict on a pairing. `baseline` compares with one device, `summary` has a row per configuration, `pairs` one per two on
equally many devices, `sides` compares folders or two values of a key, `gate` decides for continuous integration.
"""
