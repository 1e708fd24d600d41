"""A run on disk: its folder, its attempts, its journals, its tables."""

from __future__ import annotations
