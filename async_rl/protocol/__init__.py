"""The messages that processes exchange over ZeroMQ."""
