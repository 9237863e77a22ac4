"""The built-in environments: one module each, with its NAME in the manifest and its KIND."""
