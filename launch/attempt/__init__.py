"""One attempt of a run: claim it, start its processes, watch them, publish the result or judge the failure."""
