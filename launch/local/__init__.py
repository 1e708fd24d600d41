"""Runs on this machine, one after the other."""
