"""The configuration; a package so that Hydra finds it, installed or not."""
