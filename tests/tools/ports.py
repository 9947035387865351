"""A port for a group of processes on this machine."""

import socket


def free_port():
    """A port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
