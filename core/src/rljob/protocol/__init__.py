"""What parts say to each other: message types, framing, the reconnecting link, the wire format of weights."""
