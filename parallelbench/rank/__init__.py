"""What one rank does: join, check, train, measure, stop."""
