"""What pyproject.toml cannot say: the C part as a plain library, and the README as an index of packages shows it."""

import re
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

PAGES = ""  # where docs/ can be read; until there is such a place, the README's links to it become their text
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?://|#)([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\[\]]*\]\((?!https?://)[^)\s]+\)\n*")


class BuildLibrary(build_ext):
    """ctypes loads it, for any version of Python: it has no initialization function, and no version in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Any) -> list[str]:
        return list(ext.export_symbols)

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, OSError) as error:
            raise SystemExit(
                f"onnxgrad: its C part could not be compiled ({error}). Sources need a C compiler: install gcc and the "
                "headers of the C library (Debian: apt-get install gcc libc6-dev; Fedora: dnf install gcc), or install "
                "a wheel, which needs none"
            ) from None


class WheelForAnyPython(bdist_wheel):
    """py3-none-<platform>."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """Links lead where the pages are."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not PAGES:
        return LINK.sub(r"\1", IMAGE.sub("", text))
    return LINK.sub(lambda m: f"[{m[1]}]({PAGES}/{m[2]})", text)


setup(
    ext_modules=[
        Extension("onnxgrad.runtime._bridge", ["src/onnxgrad/runtime/bridge.c"], extra_link_args=["-s"]),
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelForAnyPython},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
