"""The protocol between processes: message types, framing, the reconnecting connection to the coordinator, the wire
format of weights, and the environment of a process."""
