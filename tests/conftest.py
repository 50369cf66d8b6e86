"""Settings of all tests."""

import os
import sys

from hypothesis import HealthCheck, settings

# A busy machine makes nothing wrong: no test fails for being slow.
settings.register_profile("tracekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tracekit")

# Many tests start tracekit as a user does. Where bytecode is not kept, each of these processes compiles some hundred modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
