"""Programs that the suite did not write, measured as they are. Importing this loads no framework."""
