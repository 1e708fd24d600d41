"""What is measured: each probe starts, stops, and says null where it can't measure."""

from __future__ import annotations
