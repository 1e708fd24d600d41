"""The verbs of the program `parallelbench`."""
