"""The port of a cluster that is started here: is it free, and does another sweep mean to use it?"""

import socket

from pipeline.launch.errors import BadInput


def check_port_free(port: int) -> None:
    """Raises BadInput unless a dashboard can listen on 127.0.0.1:`port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise _in_use(port, error) from error


def claim_port(port: int) -> socket.socket:
    """Keep other sweeps off `port` until the socket is closed. Raises BadInput where another one keeps us off.

    A starting cluster listens only after some seconds: until then a second sweep finds the port free.
    """
    # An abstract socket in place of a lock file: it is there for all users, on the same network as the port, and ends
    # with the process.
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0pipeline.sweep cluster.dashboard_port={port}")
    except OSError as error:
        claim.close()
        raise _in_use(port, error) from error
    return claim


def _in_use(port: int, error: OSError) -> BadInput:
    return BadInput(
        f"cluster.dashboard_port={port} is in use on this machine ({error.strerror}). Choose another with "
        f"cluster.dashboard_port={port + 1 if port < 65535 else 8265}, or use the cluster that listens there: "
        f"cluster.address=http://127.0.0.1:{port}"
    )
