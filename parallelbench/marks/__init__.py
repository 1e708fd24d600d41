"""What strategies and loaders tell the probes: what they are doing, and what they sent."""
