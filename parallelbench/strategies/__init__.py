"""Ways of training one model on several devices: one specification each, and the machinery that several share."""
