"""The engines: a module each, which loads its library only in the process that uses it."""
