"""What strategies are made of: no YAML names these, and strategies may share them."""
