"""Waits for conditions. The deadline is long, because the machine may be busy."""
import time

PATIENCE = 60  # seconds


def wait_for(condition, what="the condition of this line", failure=AssertionError):
    """Waits until a condition is true, and returns its value. `what` may be a function that describes the failure."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise failure(f"not within {PATIENCE} s: {what() if callable(what) else what}")
        time.sleep(0.01)
    return value
