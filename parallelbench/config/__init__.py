"""What a run is: its keys and components, built from plain data and checked before anything starts. Loads no torch."""

from __future__ import annotations
