"""What can be set about a shared directory."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.errors import ConfigError


@dataclass(frozen=True)
class SharedDirSettings:
    """All hosts that use one directory should agree on these, but need not."""

    root: str
    capacity_bytes: int = 0  # 0: no limit; otherwise what a collection brings the folder down to
    ttl_s: float | None = None  # a block unused for so long is removed; None: never for its age
    grace_s: float = 600.0  # nothing published or used more recently is ever collected
    touch_interval_s: float = 600.0  # a block's last use is known to about this; see recency.py
    stale_temp_s: float = 7200.0  # a temporary file this old belongs to a dead writer
    low_watermark: float = 0.95  # a collection over capacity frees down to this share of it
    threads: int = 8  # parallel reads and writes
    usage_max_age_s: float = 60.0  # `usage` scans again when its last scan is older than this

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError("threads", f"must be at least 1, not {self.threads}")
        if self.capacity_bytes < 0:
            raise ConfigError("capacity_bytes", f"must not be negative, is {self.capacity_bytes}")
        if not 0.0 < self.low_watermark <= 1.0:
            raise ConfigError("low_watermark", f"must be within (0, 1], is {self.low_watermark}")
        for name in ("grace_s", "touch_interval_s", "stale_temp_s", "usage_max_age_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(name, f"must not be negative, is {getattr(self, name)}")
        if self.ttl_s is not None and not self.ttl_s >= 2 * self.touch_interval_s:
            raise ConfigError(
                "ttl_s",
                f"{self.ttl_s} is too short: last uses are noted every touch_interval_s "
                f"({self.touch_interval_s}) only; at least twice that is needed",
            )
