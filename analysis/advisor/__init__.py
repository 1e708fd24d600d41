"""Predicts the time of training steps that nobody has measured, with an interval, and checks itself."""
