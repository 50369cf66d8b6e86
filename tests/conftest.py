"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine makes nothing wrong: no test fails for being slow.
settings.register_profile("tracekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tracekit")
