"""Bundles: what a publication's readers need of a folder of runs, in one archive, and how it is run again."""
