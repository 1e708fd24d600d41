"""Data sets as uint8 arrays, and the loader that feeds them."""
