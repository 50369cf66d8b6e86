"""Whatever the bytes, compiled code stays inside its arrays: each lies between two pages that kill who touches them."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("offset", ["count", "-1"])
def test_a_byte_outside_is_deadly(offset):
    code = (
        "import ctypes; from tests.readers.guarded import PAGE, guarded; count = PAGE; a = guarded(count);"
        f"ctypes.string_at(a.ctypes.data, count); print('inside', flush=True); ctypes.string_at(a.ctypes.data + {offset}, 1)"
    )
    done = run("-c", code)
    assert (done.stdout, done.returncode) == ("inside\n", -signal.SIGSEGV)


def test_reading_damaged_traces_touches_nothing_outside():
    done = run("-m", "tests.readers.guarded", "0", "120")
    assert done.returncode == 0, done.stderr
