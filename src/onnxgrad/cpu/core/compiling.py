"""asked_for(): who wants to know which kernels are asked for, and which of them have to be compiled."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Listener = Callable[[str, Any, bool], None]  # of a kernel's name, the types of its arguments, and whether it was found
_listeners: list[Listener] = []


@contextlib.contextmanager
def asked_for(listener: Listener) -> Iterator[None]:
    """Tells the listener of each kernel that is asked for the first time, before it is compiled unless it was found."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(name: str, types: Any, found: bool) -> None:
    """Tells all of them."""
    for listener in _listeners:
        listener(name, types, found)
