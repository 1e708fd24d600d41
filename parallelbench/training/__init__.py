"""What one rank does: join, check, train, measure, stop."""

from __future__ import annotations
