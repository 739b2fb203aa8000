"""wrap(): to come."""


def wrap(m): ...
