"""What the verbs of the program `parallelbench` do."""
