"""What a run trains with: optimizers, schedules of their rate, losses, metrics. Nothing here loads torch."""
