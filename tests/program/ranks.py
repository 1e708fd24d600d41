"""Two ranks that train together; the second one ends as a crash would. See `test_processes.py`."""

from __future__ import annotations

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
torch.distributed.barrier()
if torch.distributed.get_rank():
    os._exit(0)
sys.exit(0)
