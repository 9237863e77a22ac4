"""The built-in rewards: one module each, with its NAME in the manifest and its KIND."""
