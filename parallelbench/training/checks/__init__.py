"""Checks against one device, before, during and after training; and of what a run is made of."""
