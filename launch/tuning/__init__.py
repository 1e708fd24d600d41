"""`tune=true`: short trials choose the settings that a sweep leaves open."""
