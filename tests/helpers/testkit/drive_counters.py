"""The counters of a drive that exists on paper only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """Implements the daemon's DriveCounters."""

    backend: str = "threads"
    direct: bool = True
    mirror: bool = False
    degraded: bool = False
    reads: int = 0
    read_bytes: int = 0
    busy_us: int = 0
    cpu_us: int = 0
    retries: int = 0
    errors: int = 0
    checksum_errors: int = 0
    mirror_reads: int = 0
    latency_p50_us: int = 0
    latency_p99_us: int = 0
    last_error: str = ""
    note: str = ""
