"""Imported last by a process that others are forked from: what it holds is never collected, in no fork.

Otherwise the first garbage collection of each fork would copy all pages with objects.
"""

import gc

gc.collect()
gc.freeze()
