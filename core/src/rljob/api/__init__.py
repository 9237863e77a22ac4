"""RLJob types: schema, defaults, validation. Imports no other rljob package."""
