"""Ending Python code that runs for too long: a chat template is a program, and it gets text from strangers."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from kestrel.errors import TemplateError

T = TypeVar("T")


class _OutOfTime(BaseException):
    """Raised inside the code that took too long; no `except Exception` of that code can catch it."""


def run_limited(work: Callable[[], T], seconds: float) -> T:
    """The result of `work()`, called in this thread; TemplateError if it takes longer.

    The limit strikes between two Python instructions, so a single long operation of the interpreter is waited for.
    """
    lock = threading.Lock()
    thread = threading.get_ident()
    state = {"done": False, "struck": False}

    def strike() -> None:
        with lock:
            if not state["done"]:
                state["struck"] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_OutOfTime)
                )

    def finish() -> None:
        with lock:
            state["done"] = True
        while state["struck"]:
            pass  # the exception is on its way: it must strike here, not in the thread's next task

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    try:
        timer.start()
        try:
            result = work()
        except _OutOfTime:
            raise
        except BaseException:
            finish()
            raise
        finish()
        return result
    except _OutOfTime:
        raise TemplateError(f"the chat template took longer than {seconds:g} s on these messages") from None
    finally:
        timer.cancel()
