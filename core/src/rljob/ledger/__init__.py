"""The durable record of a run: schema, writes, payload, reader and audit."""
