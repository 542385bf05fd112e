"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("penstock", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")
