"""How long and how much a connection may take, whatever is asked over it."""

import resource
from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = 512
    """At once. Beyond, the one that has idled for longest makes room, and where all are at work the new one gets
    503."""

    head_timeout_s: float = 10.0
    """Within which a request's line and headers come, and before them TLS is agreed upon."""

    max_head_bytes: int = 64 * 2**10

    body_timeout_s: float = 60.0
    """Within which a body comes."""

    body_grace_s: float = 10.0
    min_body_bytes_per_s: float = 16 * 2**10
    """Bytes a second, at least, on the average of a body behind its grace."""

    max_body_bytes: int = 16 * 2**20
    """A context of a million tokens is about 4 MB of text."""

    keep_alive_s: int = 30
    """Of a connection with nothing asked."""

    reader_timeout_s: float = 30.0
    """Within which a client takes `reader_bytes` of what waits for it, or all."""

    min_reader_bytes: int = 16 * 2**10

    def connection_limit(self) -> int:
        """At most half of the files that this process may open: models and answers need some, too."""
        return max(1, min(self.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
