"""The kinds of data: a module each, found by itself, with how its names end or what is in its folder."""
