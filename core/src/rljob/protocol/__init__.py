"""The protocol between processes: message types, framing, the reconnecting link, the wire format of weights."""
