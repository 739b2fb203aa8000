"""KeyboardInterrupt and the like, raised while onnxruntime calls Python: the node fails, and run() raises it again.

A signal's handler runs wherever Python comes next, so most often right at the beginning of a function that
onnxruntime calls, before any `try` in it. Such an exception cannot pass through native code: ctypes hands it to
sys.unraisablehook, which is why there is a hook here. Native code takes a question without an answer for a failure.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from onnxgrad.runtime.api import FAIL, INVALID_ARGUMENT, Api
from onnxgrad.runtime.layout import ANSWER, offset_of

R = TypeVar("R")
RESULT, STATUS = offset_of(ANSWER, "result"), offset_of(ANSWER, "status")
UNANSWERED = "interrupted, by Ctrl-C perhaps, before Python could say what this node does"
_word = ctypes.c_int64
_noted: dict[int, BaseException] = {}  # by the thread that raised it
_callbacks: set[CodeType] = set()


def run(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls onnxruntime; what a signal's handler has raised while it called Python is raised again."""
    _hook_unraisable()
    thread = threading.get_ident()
    _noted.pop(thread, None)  # of a session that was run without this function
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        if thread not in _noted and UNANSWERED in str(error):  # somebody else's hook took it
            note(KeyboardInterrupt())
        raise _noted.pop(thread, error) from None
    if thread in _noted:
        raise _noted.pop(thread)
    return result


def callback(kind: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function one that native code can call, as a C function of that kind of ctypes."""

    def decorate(function: Callable[..., Any]) -> Any:
        _callbacks.add(function.__code__)
        return kind(function)

    return decorate


def answer(at: int, work: Callable[[], int], api: Api, name: str) -> None:
    """Writes what `work` returns to the ANSWER at an address, or its error as a status that names the node.

    The result is written last: whatever is raised before leaves the question unanswered.
    """
    try:
        result = work()
    except BaseException as error:
        text = str(error)
        if not isinstance(error, Exception):
            note(error)
            text = f"interrupted by {type(error).__name__}"
        code = INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError, IndexError)) else FAIL
        _word.from_address(at + STATUS).value = api.status(f"{text} (node {name!r})" if name else text, code)
        return
    _word.from_address(at + RESULT).value = result


def note(error: BaseException) -> None:
    """Has `run` raise it, in this thread."""
    _noted[threading.get_ident()] = error


@functools.cache
def _hook_unraisable() -> None:
    """Once: notes what the callbacks raise; all else goes where it went before."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        at, error = unraisable.exc_traceback, unraisable.exc_value
        if at is not None and at.tb_frame.f_code in _callbacks and error is not None:
            note(error)
        else:
            before(unraisable)

    sys.unraisablehook = hook
