"""RLJob types: schema, defaults, validation. Imports nothing of the other packages."""
