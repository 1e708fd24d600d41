"""Finished runs in the formats of experiment trackers. Reads what is stored; nothing of this runs beside a training."""
