"""From run folders to tables: finished runs checked against their manifests, unfinished ones from their journals."""
