"""Ways of training one model on several devices: a folder per family, and beside them what several families share."""

from __future__ import annotations
