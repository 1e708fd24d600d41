"""The files that `parallelbench init` writes; NAME in them is the package's name."""
